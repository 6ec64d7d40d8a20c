"""The layers that a plan makes, the check of what stands between them, and blocks of such layers."""

import sys
import weakref
from dataclasses import replace
from typing import Any, Literal, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tp_core.arguments import explain_init
from tp_core.errors import ConfigError, ModelError
from tp_core.modules import Mixin

from tp_shard._groups import _debug
from tp_shard._groups._collectives import _Copy, _Scatter, copy, gather
from tp_shard._groups._group import Group, GroupLike, as_group
from tp_shard._groups._random import RandomTracker
from tp_shard._shards import TrainedParameters, holds_shard
from tp_shard._split import Ranges
from tp_shard.nn._convert import is_transposed, widths, without_parameters
from tp_shard.nn._draws import SplitDraws, mark
from tp_shard.nn._heads import Heads, parallel_attention, section_ranges, sum_shared
from tp_shard.nn._layers import ParallelEmbedding, ParallelLinear
from tp_shard.nn._sequence import (
    SequenceState,
    SummedGradients,
    _GatherSequence,
    _ReduceScatter,
    _ScatterSequence,
    _SumAll,
    gather_sequence,
    reduce_scatter_sequence,
    scatter_sequence,
)
from tp_shard.nn._split_products import _Column, _Row
from tp_shard.nn.functional import linear, mark_output, wrong_width

# -- Checks of the region between column and row layers -------------------------------------------
# Each rank works on its own part of the features there.
# Autograd's graph shows the region, whatever the modules are called. The walk back from the input of a row
# layer ends at column layers. Each rank uses any other parameter on the way for its own part alone.


# Private: torch has no public name for the class of a Function's graph nodes. Without it the walk would stop
# nowhere; `a_plan_that_forgets_what_stands_inside_names_it_at_the_first_forward` notices its loss.
_BEGIN = (_Column._backward_cls, _GatherSequence._backward_cls)
_SUMMED = (
    _Copy._backward_cls,
    _SumAll._backward_cls,
    _Scatter._backward_cls,
    _ScatterSequence._backward_cls,
)
_END = (_Row._backward_cls, _ReduceScatter._backward_cls)
# Weak on both sides: a reference from a module to its model would keep the model alive.
_models: weakref.WeakKeyDictionary[nn.Module, weakref.ref[nn.Module]] = weakref.WeakKeyDictionary()


class Regions:
    """The regions of a split model: those checked are checked again where other parameters are trained.

    Attributes:
        version: A number that grows when other parameters are trained, or the mode changes.
    """

    def __init__(self, model: nn.Module) -> None:
        self.version = 0
        self._parameters = TrainedParameters(model)
        self._seen: tuple[bool, ...] = ()

    def begin(self, model: nn.Module, _args: Any) -> None:
        """Look which parameters are trained; a hook before the model's ``forward``."""
        if torch.compiler.is_compiling():
            return
        seen = model.training, *self._parameters.flags()
        if seen != self._seen:
            self._seen = seen
            self.version += 1


def remember_names(model: nn.Module) -> None:
    """Remember the model of its modules, so that messages name them by their paths."""
    reference = weakref.ref(model)
    for module in model.modules():
        _models[module] = reference


def check_region(x: Tensor, layer: nn.Module) -> bool:
    """Raise if a row layer's input depends on a whole parameter with a gradient that is not summed.

    Returns:
        Whether there was a graph to check.
    """
    if x.grad_fn is None:
        return False
    _, leaves = _walk_graph(x, (*_BEGIN, *_SUMMED))
    wholes = [leaf for leaf in leaves if isinstance(leaf, nn.Parameter) and not holds_shard(leaf)]
    if wholes:
        names = [_parameter_name(parameter, layer) for parameter in wholes]
        sorted_names = sorted(name for name in names if name)
        inputs = ", ".join(sorted_names)
        if not sorted_names:
            shapes = ", ".join(str(tuple(parameter.shape)) for parameter in wholes)
            inputs = f"parameters of shape {shapes}"
        owners = sorted({name.rpartition(".")[0] for name in sorted_names}) or ["..."]
        pairs = ", ".join(f'"{owner}": ts.Replicated()' for owner in owners)
        msg = (
            f"{_name(layer)} takes this rank's part of the features, and {inputs}, on which its input "
            "depends, is the same on all ranks: each would get the gradient of its own part alone. Add "
            f"{{{pairs}}} to the plan, which sums these gradients, or leave the block whole"
        )
        raise ModelError(msg)
    return True


def check_inside(x: object, module: nn.Module) -> bool:
    """Raise if the input of a replicated module is whole, and not this rank's part of the features.

    Returns:
        Whether there was a graph to check.
    """
    if not isinstance(x, Tensor) or x.grad_fn is None:
        return False
    stops, leaves = _walk_graph(x, (*_BEGIN, *_SUMMED, *_END))
    if stops & {*_BEGIN, _Scatter._backward_cls}:
        return True
    if any(not isinstance(leaf, nn.Parameter) or holds_shard(leaf) for leaf in leaves):
        return False  # only a piece of the graph is visible, as when a checkpoint recomputes it
    msg = (
        f"{_name(module)} is Replicated() in the plan, and its input comes from no column layer: all ranks "
        "have the same, and summing their gradients would multiply them; leave it out of the plan"
    )
    raise ModelError(msg)


def _walk_graph(x: Tensor, stops: tuple[type, ...]) -> tuple[set[type], list[Tensor]]:
    """Walk the graph back from a tensor; return the classes of the nodes that ended it, and its leaves."""
    passing = _passing_class()
    stopped_at: set[type] = set()
    leaves: list[Tensor] = []
    seen = set()
    pending = [(x.grad_fn, x.output_nr)]
    while pending:
        node, output = pending.pop()
        # Through this node only the input of the same number is followed: through all of them every tensor of
        # the unit would seem to depend on every other one (T5 under `fully_shard`).
        passes = passing is not None and isinstance(node, passing)
        edge = (node, output if passes else None)
        if node is None or edge in seen:
            continue
        seen.add(edge)
        if isinstance(node, stops):
            stopped_at.add(type(node))
        elif hasattr(node, "variable"):
            leaves.append(node.variable)
        elif passes:
            pending += node.next_functions[output : output + 1]
        else:
            pending += node.next_functions
    return stopped_at, leaves


def _passing_class() -> type | None:
    """Return the class of the node that ``fully_shard`` puts under all inputs of a unit; ``None`` without it.

    Each input passes through it separately.
    """
    # Private: torch has no public name for it. `t5_is_right_under_fully_shard` notices its loss.
    module = sys.modules.get("torch.distributed.fsdp._fully_shard._fsdp_param_group")
    function: Any = getattr(module, "RegisterPostBackwardFunction", None)
    if function is None:
        return None
    return cast("type", function._backward_cls)


def _parameter_name(parameter: Tensor, near: nn.Module) -> str | None:
    root = _root(near)
    if root is not None:
        for name, p in root.named_parameters():
            if p is parameter:
                return name
    return None


def _name(module: nn.Module) -> str:
    """Return the name of a module in its model, or else what it is."""
    root = _root(module)
    if root is not None:
        for name, m in root.named_modules():
            if m is module and name:
                return str(name)
    return f"{type(module).__name__}({module.extra_repr()})"


def _root(module: nn.Module) -> nn.Module | None:
    reference = _models.get(module)
    if reference is None:
        return None
    return reference()


# -- Dropout of split features ----------------------------------------------------------------------


@explain_init
class ParallelDropout(nn.Dropout):
    """A dropout of split features: each rank draws its own mask.

    The masks follow torch's generator, so ``torch.utils.checkpoint`` draws the same ones again.

    Args:
        p: The probability, from 0 to 1, with which an element is dropped.
        inplace: Whether the input is overwritten.
        tracker: The rank's own random numbers; the layers of one model share it.

    Collectives: none.

    Example:
        >>> drop = ParallelDropout(0.5, tracker=ts.RandomTracker(1))
        >>> drop(torch.ones(4)).shape
        torch.Size([4])
    """

    def __init__(self, p: float = 0.5, inplace: bool = False, *, tracker: RandomTracker) -> None:
        super().__init__(p, inplace)
        self.tracker = tracker

    def forward(self, input: Tensor) -> Tensor:
        """Drop elements of this rank's shard, of any shape, and scale the others, in training alone."""
        if not self.training or self.p == 0:
            return input
        with self.tracker.fork(input.device):
            return super().forward(input)


# -- Layers of plans: with heads that ranks share, and with split sequences between the layers ----


class PlannedLinear(ParallelLinear):
    """A :class:`ParallelLinear` with pieces that ranks may share, and with sequence parallelism.

    Collectives, with a sequence: for split outputs an all-gather forward and a reduce-scatter backward. For
    split inputs a reduce-scatter forward, and backward an all-gather and an all-reduce of the bias's
    gradient. Pieces that ranks share cost an all-reduce of their gradients.

    Attributes:
        sequence: The sequence lengths of the model; ``None`` if the sequence is whole.
        takes_whole: Whether the block around the layer gathers the sequence, and sums its gradient.
        summed: The parameters that share one all-reduce with the bias of a row layer.
        regions: The regions of the model; ``None`` for a layer without a plan.
        checked_region: Their version when the region before a row layer was checked.
        draws: The random numbers of the model between column and row layers.
    """

    sequence: SequenceState | None = None
    takes_whole = False
    summed: SummedGradients | None = None
    regions: Regions | None = None
    checked_region: int | None = None
    draws: SplitDraws | None = None

    @classmethod
    def from_plan(
        cls,
        linear: nn.Module,
        dim: int,
        *,
        gather_output: bool,
        group: Group,
        ranges: tuple[Ranges, ...] | None,
        sequence: SequenceState | None,
    ) -> Self:
        """Return a layer with the options of a plain one, without parameters."""
        layer = without_parameters(cls, linear)
        in_features, out_features = widths(linear)
        # With uneven ranges the width of an input does not say whether it is split.
        input_is_parallel = None
        if dim == 0 and ranges is not None:
            input_is_parallel = True
        layer._describe(
            in_features,
            out_features,
            dim,
            gather_output=gather_output,
            input_is_parallel=input_is_parallel,
            group=group,
            ranges=ranges,
        )
        if is_transposed(linear):
            layer.order_type = 1
            weight = layer.splits["weight"]
            layer.splits = {**layer.splits, "weight": replace(weight, dim=1 - weight.dim)}
        layer.sequence = sequence
        return layer

    def forward(self, input: Tensor) -> Tensor:
        """Return ``input @ weight.T + bias``, as :class:`ParallelLinear` does.

        Args:
            input: The input, of shape (..., in_features), or this rank's shard of it. With a sequence and
                split outputs, this rank's part of the sequence.

        Returns:
            A tensor of shape (..., out_features), or with split outputs this rank's shard of it; with a
            sequence and split inputs, this rank's part of the sequence.
        """
        # The states of generators are no part of a compiled graph: without an open visit no dropout is
        # active.
        if self.draws is None or (torch.compiler.is_compiling() and not self.draws.visits):
            return self._product(input)
        if self.dim == 0:
            self.draws.end()
        output = self._product(input)
        is_split = self.dim != 0 and not self.gather_output
        if is_split:
            is_watched = self.draws.begin(input)
        else:
            is_watched = self.draws.is_watching
        if is_watched:
            mark(output, is_split=is_split)
        return output

    def _product(self, input: Tensor) -> Tensor:
        self.refuse_norms()
        group = self.group
        is_row = self.dim == 0
        if is_row and group.size > 1 and not torch.compiler.is_compiling():
            self._check_region(input)
        weight: Tensor = self.weight
        bias: Tensor | None = self.bias
        if "weight" in self.splits:
            weight = sum_shared(weight, self.splits["weight"], group)
        if bias is not None and "bias" in self.splits:
            bias = sum_shared(bias, self.splits["bias"], group)
        if self.order_type:  # a weight that is kept as (in, out)
            weight = weight.t()
        if self.sequence is None or group.size == 1:
            return linear(input, weight, bias, self, group, self)
        if input.size(-1) != weight.size(1):
            raise wrong_width(input, weight.size(1), self)
        if is_row:
            # (..., seq, local in) -> (..., local seq, out)
            output = reduce_scatter_sequence(F.linear(input, weight), self.sequence, group)
            if bias is None:
                return output
            # Each rank adds the bias to its part of the sequence, so its gradients are summed.
            if self.summed is None:
                return output + copy(bias, group=group)
            return output + self.summed.passed(bias)
        if not self.takes_whole:
            input = gather_sequence(input, self.sequence, group)
        output = F.linear(input, weight, bias)
        if self.gather_output:
            return gather(output, -1, size=self.out_features, group=group)
        return mark_output(output, self.out_features)

    def _check_region(self, input: Tensor) -> None:
        # Outside of debug mode once for each set of trained parameters: the walk costs more than the product
        # of a small layer.
        version = 0 if self.regions is None else self.regions.version
        if self.checked_region == version and not _debug.state.enabled:
            return
        # A whole input is scattered by this layer, so it has no region. The widths of the whole and of a part
        # differ, as every one of several ranks has some features.
        is_part = input.dim() > 0 and input.size(-1) != self.in_features
        if is_part and check_region(input, self):
            self.checked_region = version


class PlannedEmbedding(ParallelEmbedding):
    """A :class:`ParallelEmbedding` with an output that is split along the sequence.

    Collectives: those of its table, and an all-gather backward.

    Attributes:
        sequence: The sequence lengths of the model; ``None`` if the sequence is whole.
        takes_whole: Whether the block around it works on whole sequences.
    """

    sequence: SequenceState | None = None
    takes_whole = False

    def forward(self, input: Tensor) -> Tensor:
        """Return the rows of ``input``, this rank's part of the sequence."""
        output = super().forward(input)
        # A lookup in a shard marks its result as split, and the ranks have joined it since.
        mark(output, is_split=not self.gather_output and self.dim == 1)
        if self.sequence is None or self.takes_whole:
            return output
        return scatter_sequence(output, self.sequence, self.group)


class SequenceMixin(Mixin):
    """A module with parameters that all ranks have, on a part of the sequence or of the features.

    Forward: nothing. Backward: an all-reduce of the parameters' gradients, one for all of the model.
    """

    sequence_group: Group
    summed: SummedGradients | None = None
    part_of: Literal["sequence", "features"] = "sequence"
    regions: Regions | None = None
    checked_region: int | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.part_of == "features" and self.sequence_group.size > 1 and not torch.compiler.is_compiling():
            x = args[0] if args else None
            self._check_region(x)
        own = self.__dict__["_parameters"]
        # Replaced for this call alone, past `__setattr__`: what takes their place are no parameters but
        # results that sum their gradients. The optimizer and the state must not see them, also after an
        # error.
        passed = dict(own)
        for name, parameter in own.items():
            if parameter is not None:
                passed[name] = self._passed(parameter)
        self.__dict__["_parameters"] = passed
        try:
            return super().forward(*args, **kwargs)  # type: ignore[misc]  # of the class it is mixed into
        finally:
            self.__dict__["_parameters"] = own

    def _check_region(self, first_input: object) -> None:
        version = 0 if self.regions is None else self.regions.version
        if self.checked_region != version and check_inside(first_input, self):  # type: ignore[arg-type]  # mixed into a module
            self.checked_region = version

    def _passed(self, parameter: Tensor) -> Tensor:
        if self.summed is None:
            return copy(parameter, group=self.sequence_group)
        return self.summed.passed(parameter)


# -- Transformer blocks with split layers: attention with shared key heads, and a gated MLP -------


@explain_init
class ParallelAttention(nn.Module):
    """A self-attention with heads that are split over ranks, and key heads that query heads may share.

    Heads are split as in Megatron-LM (arXiv:1909.08053). Shared key heads are grouped-query attention
    (arXiv:2305.13245). ``sequence`` is Megatron-LM's sequence parallelism (arXiv:2205.05198). Inputs and
    outputs have shape (..., seq, dim), the same on all ranks; with ``sequence`` each rank has its part of
    seq.

    Collectives: an all-reduce forward and one backward. With fewer key heads than ranks one more backward, of
    the gradients of the key and value heads that ranks share. With ``sequence`` an all-gather and a
    reduce-scatter take the place of each all-reduce.

    Args:
        dim: The width of the input and the output.
        heads: The number of query heads, over all ranks.
        kv_heads: The number of key heads; as many by default.
        bias: Whether the projections add a bias.
        causal: Whether a position attends only to itself and earlier ones.
        dropout: The probability, from 0 to 1, with which an attention weight is dropped in training.
        sequence: The sequence lengths of the model, if sequences are split between its layers.
        device: The device of the parameters.
        dtype: The type of the parameters.
        group: The ranks; the current model-parallel group by default.

    Raises:
        ConfigError: The heads cannot be divided over the ranks.

    Example:
        >>> ParallelAttention(16, heads=4, kv_heads=2)(torch.ones(2, 5, 16)).shape
        torch.Size([2, 5, 16])
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        kv_heads: int | None = None,
        *,
        bias: bool = True,
        causal: bool = False,
        dropout: float = 0.0,
        sequence: SequenceState | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        group: GroupLike = None,
    ) -> None:
        super().__init__()
        if heads < 1 or dim % heads:
            msg = f"dim={dim} features are divided over the heads, and heads={heads} does not divide them"
            raise ConfigError(msg)
        self.heads = heads
        self.kv_heads = heads if kv_heads is None else kv_heads
        self.causal = causal
        self.dropout = dropout
        self.group = as_group(group)
        divided = Heads(self.heads, self.kv_heads, self.group.size)
        width = dim // heads  # features of a head
        self.qkv = PlannedLinear(
            dim,
            (heads + 2 * self.kv_heads) * width,
            bias,
            -1,
            device=device,
            dtype=dtype,
            group=self.group,
            ranges=divided.ranges(width, "qkv"),
        )
        self.out = PlannedLinear(
            heads * width,
            dim,
            bias,
            0,
            input_is_parallel=True,
            device=device,
            dtype=dtype,
            group=self.group,
            ranges=divided.ranges(width, "q"),
        )
        self.qkv.sequence = sequence
        self.out.sequence = sequence

    def forward(self, input: Tensor) -> Tensor:
        """Return a tensor like ``input``, of shape (..., seq, dim)."""
        dropout = self.dropout if self.training else 0.0
        attended = parallel_attention(
            self.qkv(input),
            self.heads,
            self.kv_heads,
            causal=self.causal,
            dropout=dropout,
            group=self.group,
        )
        output: Tensor = self.out(attended)
        return output


@explain_init
class ParallelSwiGLU(nn.Module):
    """The gated MLP ``down(silu(gate(x)) * up(x))``, with gate and up in one split layer.

    From Shazeer, "GLU Variants Improve Transformer" (arXiv:2002.05202), split as Megatron-LM's MLP
    (arXiv:1909.08053). Inputs and outputs have shape (..., dim), the same on all ranks. With ``sequence``
    (sequence parallelism, arXiv:2205.05198) each rank has its part of the sequence.

    Collectives: an all-reduce forward and one backward. With ``sequence`` an all-gather and a reduce-scatter
    take the place of each all-reduce.

    Args:
        dim: The width of the input and the output.
        hidden: The width of the hidden layer, over all ranks.
        bias: Whether the layers add a bias.
        sequence: The sequence lengths of the model, if sequences are split between its layers.
        device: The device of the parameters.
        dtype: The type of the parameters.
        group: The ranks; the current model-parallel group by default.

    Example:
        >>> ParallelSwiGLU(8, 12)(torch.ones(3, 8)).shape
        torch.Size([3, 8])
    """

    def __init__(
        self,
        dim: int,
        hidden: int,
        *,
        bias: bool = False,
        sequence: SequenceState | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        group: GroupLike = None,
    ) -> None:
        super().__init__()
        ranks = as_group(group)
        self.gate_up = PlannedLinear(
            dim,
            2 * hidden,
            bias,
            -1,
            device=device,
            dtype=dtype,
            group=ranks,
            ranges=section_ranges(2 * hidden, 2, ranks.size),
        )
        self.down = PlannedLinear(hidden, dim, bias, 0, device=device, dtype=dtype, group=ranks)
        self.gate_up.sequence = sequence
        self.down.sequence = sequence

    def forward(self, input: Tensor) -> Tensor:
        """Return a tensor like ``input``, of shape (..., dim)."""
        gate, up = self.gate_up(input).chunk(2, dim=-1)
        output: Tensor = self.down(F.silu(gate) * up)
        return output
