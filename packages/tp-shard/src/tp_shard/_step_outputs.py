"""What a step returns of a split model, compared over the ranks of a copy the first time that it runs.

The output of ``Column()`` has a rank's own features. A function of torch that goes over all of them, as a
loss, a softmax or an argmax does, then computes a number of this rank's own, and says nothing. So the
functions that meet such an output are noted while a step runs for the first time, and its results are
compared. Where they differ, the first of these functions is named, before the optimizer has made a step.

A shard of a weight is such a part, too, where code outside of its layer computes with it. The buffers of the
model that are written by what was computed from a part are compared like results.

A step that joins the numbers of the ranks itself meets the same functions, and returns the same on all ranks.
"""

import math
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from numbers import Real
from types import FrameType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from tp_core import tree_leaves
from tp_core.compare import functions_named
from tp_core.data import SampleRows, StepOutput, step_identity
from tp_core.errors import ModelError
from tp_core.replicas import not_compiled_alone

from tp_shard._groups._group import Group
from tp_shard._shards import ParallelLayer, get_parallel_dim, get_parallel_size
from tp_shard._training import gather_numbers

_ORIGIN = "_split_output"
"""The attribute of a tensor with a rank's own features: the `_SplitOutput` from which it comes."""
_OWN = "_own_number"
"""The attribute of what a function has computed from a rank's own features: the `_Meeting`."""


class _SplitOutput(NamedTuple):
    """A dimension that is split over the ranks.

    Attributes:
        dim: The dimension, counted from the end.
        layer: The name of the layer that has computed it, or of the weight; empty for a function of tp-shard.
        width: Its size on this rank.
        size: Its size over all ranks; ``None`` if it is not known.
        is_weight: Whether it is of a layer's weight or bias.
    """

    dim: int
    layer: str
    width: int
    size: int | None
    is_weight: bool = False


class _Meeting(NamedTuple):
    """A function that went over a split dimension, by name, and what it met."""

    function: str
    output: _SplitOutput


# -- Functions that go over a dimension -------------------------------------------------------------


class _Reduction(NamedTuple):
    """The place of the dimension among a function's arguments, and the dimension without one."""

    place: int
    default: int | None = None


_REDUCTIONS: dict[Any, _Reduction] = {
    function: reduction
    for names, reduction in (
        ("softmax log_softmax softmin logsumexp argmax argmin max min amax amin", _Reduction(1)),
        ("sum nansum mean nanmean prod median nanmedian mode std var std_mean var_mean", _Reduction(1)),
        ("cumsum cumprod cummax cummin logcumsumexp aminmax", _Reduction(1)),
        ("sort argsort glu", _Reduction(1, -1)),
        ("topk kthvalue", _Reduction(2, -1)),
        ("norm", _Reduction(2)),
        ("normalize cosine_similarity", _Reduction(2, 1)),
        ("gumbel_softmax", _Reduction(4, -1)),
    )
    for function in functions_named(names)
}
_REDUCTIONS |= {torch.linalg.vector_norm: _Reduction(2), torch.linalg.norm: _Reduction(2)}
_OVER_CLASSES = functions_named("cross_entropy nll_loss")
_OVER_LAST = functions_named("layer_norm rms_norm")
_OVER_ALL = functions_named(
    "mse_loss l1_loss smooth_l1_loss huber_loss kl_div binary_cross_entropy binary_cross_entropy_with_logits "
    "soft_margin_loss multilabel_margin_loss multilabel_soft_margin_loss multi_margin_loss"
)


def _goes_over(
    function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], tensor: Tensor, dim: int
) -> bool:
    """Return whether a function goes over a dimension, counted from the end, of one of its arguments."""
    if function in _OVER_ALL:
        return kwargs.get("reduction") != "none"
    first = args[0] if args else kwargs.get("input")
    if first is not tensor:
        return False
    at: int = tensor.dim() + dim
    if function in _OVER_CLASSES:
        return at == (1 if tensor.dim() > 1 else 0)
    if function in _OVER_LAST:
        shape = args[1] if len(args) > 1 else kwargs.get("normalized_shape", ())
        return -dim <= len(shape)
    reduction = _REDUCTIONS.get(function)
    if reduction is None:
        return False
    over = kwargs.get("dim", kwargs.get("axis", reduction.default))
    if len(args) > reduction.place:
        over = args[reduction.place]
    if isinstance(over, Tensor) or "other" in kwargs:  # the larger one of two tensors
        return False
    if over is None or isinstance(over, bool) or over == ():
        return True
    dims = over if isinstance(over, tuple | list) else (over,)
    return any(isinstance(d, int) and d % tensor.dim() == at for d in dims)


def _dim_after(tensor: Tensor, dim: int, result: Tensor) -> int | None:
    """Return the place of a dimension in the result of a function, counted from the end; ``None`` if lost."""
    if result.dim() and _share_memory(result, tensor):
        # A view: the same elements, as far apart.
        for place in range(-1, -1 - result.dim(), -1):
            if (result.size(place), result.stride(place)) == (tensor.size(dim), tensor.stride(dim)):
                return place
        return None
    if result.dim() >= -dim and result.size(dim) == tensor.size(dim):
        return dim
    return None


def _share_memory(one: Tensor, other: Tensor) -> bool:
    try:
        return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # sparse tensors, and those of torch.func, have none
        return False


class _OwnNumbers(TorchFunctionMode):
    """A mode that follows split outputs through functions, and what is computed from this rank's part alone.

    Args:
        weights: The split weights of layers, by identity.

    Attributes:
        first: The first function that went over a split dimension, and what it met; ``None`` so far.
    """

    def __init__(self, weights: Mapping[int, _SplitOutput]) -> None:
        super().__init__()
        self.first: _Meeting | None = None
        self._weights = weights

    @not_compiled_alone
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if torch.compiler.is_compiling() or not isinstance(result, Tensor | tuple | list):
            return result
        made = list(_plain_tensors([result]))
        for tensor in _plain_tensors((*args, *kwargs.values()), self._weights):
            origin = self._weights.get(id(tensor)) or _origin(tensor)
            met = getattr(tensor, _OWN, None)
            goes_over = origin is not None and _goes_over(func, args, kwargs, tensor, origin.dim)
            if origin is not None and origin.is_weight and not goes_over:
                # A product, or a part of the rows: another number than the whole weight's.
                goes_over = any(_dim_after(tensor, origin.dim, value) is None for value in made)
            if met is None and origin is not None and goes_over and not _is_called_here():
                met = _Meeting(getattr(func, "__name__", str(func)), origin)
                self.first = self.first or met
            for value in made:
                place = None if origin is None else _dim_after(tensor, origin.dim, value)
                if origin is not None and place is not None:
                    setattr(value, _ORIGIN, origin._replace(dim=place))
                if met is not None and not hasattr(value, _OWN):
                    setattr(value, _OWN, met)
        return result


def _is_called_here() -> bool:
    """Return whether a function is called by tp-shard, which joins what it computes of a part."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "torch":
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "tp_shard"


def _plain_tensors(values: Iterable[Any], more: Collection[int] = ()) -> Iterator[Tensor]:
    """Yield the tensors among some values and in the tuples and lists among them, and ``more`` by identity.

    Without other parameters, which keep their attributes, and tensors of other classes.
    """
    for value in values:
        inner = (value,)
        if isinstance(value, tuple | list):
            inner = tuple(value)
        for each in inner:
            if type(each) is Tensor or id(each) in more:
                yield each


def _origin(tensor: Tensor) -> _SplitOutput | None:
    origin: _SplitOutput | None = getattr(tensor, _ORIGIN, None)
    if origin is None and get_parallel_dim(tensor) in (1, -1) and tensor.dim():
        return _SplitOutput(-1, "", tensor.size(-1), get_parallel_size(tensor))
    return origin


def _note_output(name: str, _layer: nn.Module, _args: Any, output: Any) -> None:
    """Note the layer of a split output; a hook after the layer's ``forward``."""
    if type(output) is Tensor and output.dim() and get_parallel_dim(output) in (1, -1):
        origin = _SplitOutput(-1, name, output.size(-1), get_parallel_size(output))
        setattr(output, _ORIGIN, origin)


# -- The first run of a step ------------------------------------------------------------------------


class StepOutputs:
    """The comparison of a step's results over the ranks of a copy, once for each step, mode and model.

    Args:
        group: The ranks of the copy.
        device: The device of this rank.
    """

    def __init__(self, group: Group, device: torch.device) -> None:
        self.group = group
        self.device = device
        self._compared: WeakKeyDictionary[nn.Module, set[tuple[object, ...]]] = WeakKeyDictionary()

    def watched(
        self, step: Callable[..., StepOutput], models: Sequence[nn.Module]
    ) -> Callable[..., StepOutput]:
        """Return the step, or one that compares its results the first time.

        Collective of its first call: an all-gather of a few numbers.
        """
        if self.group.size == 1 or not models:
            return step
        key = step_identity(step), models[0].training, torch.is_grad_enabled()
        compared = self._compared.setdefault(models[0], set())
        if key in compared:
            return step
        if any(map(_is_compiled, models)):
            compared.add(key)
            return step

        def run(*arguments: Any) -> StepOutput:
            with _noted_outputs(arguments), _OwnNumbers(_split_weights(models)) as mode:
                output = step(*arguments)
            self._compare(_values(output) | _own_buffers(models), mode.first)
            compared.add(key)
            return output

        return run

    def _compare(self, results: Mapping[str, list[Any]], first: _Meeting | None) -> None:
        """Raise if the ranks return different values, computed from a rank's part of a split output.

        Raises:
            ModelError: They do, on every rank.

        Collective: an all-gather of a few numbers.
        """
        values = list(results.items())[:_MOST]
        met = [_meeting(name, leaves, first) for name, leaves in values]
        sent = torch.zeros(2, _MOST, dtype=torch.float64)
        for at, (_, leaves) in enumerate(values):
            sent[0, at] = _number(leaves)
            sent[1, at] = float(met[at] is not None)
        rows = gather_numbers(sent.to(self.device), self.group).cpu()  # (ranks, 2, values)
        for at, (name, leaves) in enumerate(values):
            by_rank: list[float] = rows[:, 0, at].tolist()
            is_own = bool(rows[:, 1, at].any())
            if is_own and max(by_rank) - min(by_rank) > _limit(leaves, by_rank):
                raise ModelError(_difference(name, by_rank, met[at]))


_MOST = 32
"""The values that ranks compare: a step rarely returns more."""


@contextmanager
def _noted_outputs(arguments: tuple[Any, ...]) -> Iterator[None]:
    """Context in which the split outputs of models know their layers."""
    with ExitStack() as stack:
        for model in arguments:
            if not isinstance(model, nn.Module):
                continue
            for name, module in model.named_modules():
                if isinstance(module, ParallelLayer):
                    hook = module.register_forward_hook(partial(_note_output, name))
                    stack.callback(hook.remove)
        yield


def _split_weights(models: Sequence[nn.Module]) -> dict[int, _SplitOutput]:
    """Return where the weights and biases of parallel layers are split, by identity."""
    weights = {}
    for model in models:
        for path, layer in model.named_modules():
            if not isinstance(layer, ParallelLayer):
                continue
            for name, split in layer.splits.items():
                shard = layer._parameters.get(name)
                if type(shard) is nn.Parameter:
                    dim = split.dim - shard.dim()
                    place = f"{path}.{name}".removeprefix(".")
                    weights[id(shard)] = _SplitOutput(dim, place, shard.size(dim), split.size, is_weight=True)
    return weights


def _own_buffers(models: Sequence[nn.Module]) -> dict[str, list[Any]]:
    """Return the buffers that have a rank's own numbers."""
    named = (pair for model in models for pair in model.named_buffers())
    return {f"buffer {name}": [buffer] for name, buffer in named if hasattr(buffer, _OWN)}


def _is_compiled(model: nn.Module) -> bool:
    """Return whether a part of a model is compiled: hooks and modes would make its compiler begin again."""
    return any("_orig_mod" in m._modules or m._compiled_call_impl is not None for m in model.modules())


def _values(output: StepOutput) -> dict[str, list[Any]]:
    """Return the tensors and numbers that a step returns, by name; of a pair with its weight the value."""
    named = output if isinstance(output, Mapping) else {"loss": output}
    values: dict[str, list[Any]] = {}
    for name, value in named.items():
        of_name = value.pieces if isinstance(value, SampleRows) else value
        values[str(name)] = [v for v in tree_leaves(of_name) if isinstance(v, Tensor | Real)]
    return values


def _meeting(name: str, leaves: Sequence[Any], first: _Meeting | None) -> _Meeting | None:
    """Return the function by which a returned value is this rank's own, if there is one."""
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            return first  # a number does not know from what it was computed
        met: _Meeting | None = getattr(leaf, _OWN, None)
        origin = _origin(leaf)
        if met is None and origin is not None:
            met = _Meeting(f"the step's {name!r}", origin)
        if met is not None:
            return met
    return None


def _number(leaves: Sequence[Any]) -> float:
    """Return the sum of all elements, which differs where one of them does."""
    total = 0.0
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            values = torch.view_as_real(leaf) if leaf.is_complex() else leaf
            total += float(values.detach().to_dense().double().nan_to_num(0.0, 0.0, 0.0).sum())
        else:
            total += float(leaf)
    return 0.0 if math.isnan(total) else total


def _limit(leaves: Sequence[Any], by_rank: Sequence[float]) -> float:
    """Return the largest difference that counts as none.

    Ranks compute the same from the same. An accelerator may add in another order each time, which shows in
    the last digits; of 16 bits any other number differs.
    """
    is_coarse = any(isinstance(v, Tensor) and v.dtype in {torch.bfloat16, torch.float16} for v in leaves)
    return 0.0 if is_coarse else 1e-6 * max(abs(number) for number in by_rank)


def _difference(name: str, by_rank: Sequence[float], met: _Meeting | None) -> str:
    values = ", ".join(f"{number:.6g}" for number in by_rank)
    what = f"the ranks that hold a model together return different values of {name!r} ({values}): "
    if met is None:
        return what + "another rank names the function that takes its part of a split output for the whole"
    _, layer, width, size, is_weight = met.output
    of = "" if size is None else f" of {size}"
    if is_weight:
        return what + (
            f"{met.function} computes with {layer!r} outside of its layer, and takes the {width}{of} rows or "
            "columns of this rank for all of them. Call the layer, join the results with "
            "ts.distributed.reduce() or gather(), or leave the layer whole"
        )
    output = f"the output of {layer!r}" if layer else "an output"
    return what + (
        f"{met.function} has {output}, which is split, and takes the {width}{of} features of this rank for "
        "all of them. Give the layer gather_output=True, or join the output with ts.distributed.gather(); "
        "for a loss over classes take ts.nn.functional.parallel_cross_entropy()"
    )
