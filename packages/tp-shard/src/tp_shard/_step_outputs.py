"""What a step computes of a split model, looked through on the ranks of a copy the first time that it runs.

The output of ``Column()`` has a rank's own features. A function of torch that goes over all of them, as a
loss, a softmax or a norm does, then computes a number of this rank's own, and says nothing. So the split
dimension is followed through torch's operators while a step runs for the first time (`_split_marks`). Where a
rank's own number comes into what the step returns, or into a layer, the function is named, before the
optimizer has made a step.

A shard of a weight is such a part, too, where code outside of its layer computes with it. So is the size of
a split dimension, where a tensor is made from it. The buffers of the model that are written by what was
computed from a part are compared like results.

A step that joins the numbers of the ranks itself meets the same functions, and has the same on all ranks:
these are compared in the end, and nothing is refused for the meeting alone.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from numbers import Real
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from tp_core import tree_leaves
from tp_core.data import SampleRows, StepOutput, step_identity
from tp_core.errors import ModelError

from tp_shard._groups._group import Group
from tp_shard._shards import ParallelLayer
from tp_shard._split_flow import SplitDim
from tp_shard._split_marks import (
    REMEDY,
    LayerHooks,
    Meeting,
    OwnInput,
    OwnNumbers,
    SplitMark,
    SplitPart,
    SplitSource,
    mark_of,
    meeting_in_words,
    piece_lengths,
)
from tp_shard._training import gather_numbers


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
            mode = OwnNumbers(_split_weights(models))
            with _watched_layers(arguments, mode), mode:
                output = step(*arguments)
            self._compare(_values(output) | _own_buffers(models), mode)
            compared.add(key)
            return output

        return run

    def _compare(self, results: Mapping[str, list[Any]], mode: OwnNumbers) -> None:
        """Raise if a part of a split output was taken for the whole, in what is returned or in a layer.

        Raises:
            ModelError: It was, and the ranks have different values for it; on every rank.

        Collective: an all-gather of a few numbers.
        """
        values = list(results.items())[:_MOST]
        met = [_meeting(name, leaves, mode.first) for name, leaves in values]
        faults = mode.faults[:_MOST]
        # Of each value its number and whether it is of a part; of each fault its digest and what it is.
        sent = torch.zeros(4, _MOST, dtype=torch.float64)
        for at, (_, leaves) in enumerate(values):
            sent[0, at] = _number(leaves)
            sent[1, at] = float(met[at] is not None)
        for at, fault in enumerate(faults):
            if fault.digest is None:
                sent[3, at] = _CERTAIN
            else:
                sent[2, at] = fault.digest.to(sent)
                sent[3, at] = _IF_DIFFERENT
        rows = gather_numbers(sent.to(self.device), self.group).cpu()  # (ranks, 4, values)
        for at in range(_MOST):
            kinds = rows[:, 3, at]
            digests: list[float] = rows[:, 2, at].tolist()
            differs = max(digests) - min(digests) > 1e-6 * max(map(abs, digests))
            # Ranks do the same: where one of them has no fault here, its parts are of other sizes.
            if (kinds == _CERTAIN).any() or (kinds.any() and (differs or not kinds.all())):
                own_fault = faults[at] if at < len(faults) else None
                raise ModelError(_taken(own_fault))
        for at, (name, leaves) in enumerate(values):
            by_rank: list[float] = rows[:, 0, at].tolist()
            is_own = bool(rows[:, 1, at].any())
            if is_own and max(by_rank) - min(by_rank) > _limit(leaves, by_rank):
                raise ModelError(_difference(name, by_rank, met[at]))


_MOST = 32
"""The values that ranks compare: a step rarely returns more."""
_CERTAIN, _IF_DIFFERENT = 2.0, 1.0


@contextmanager
def _watched_layers(arguments: tuple[Any, ...], mode: OwnNumbers) -> Iterator[None]:
    """Context in which the parallel layers of models look at their inputs, and mark their outputs."""
    layers = LayerHooks(mode)
    with ExitStack() as stack:
        for model in arguments:
            if not isinstance(model, nn.Module):
                continue
            for name, module in model.named_modules():
                if isinstance(module, ParallelLayer):
                    enter = partial(layers.enter, name)
                    # Not the layer's own way to register one, which asks whether it is a norm of the weight.
                    before = nn.Module.register_forward_pre_hook(module, enter, with_kwargs=True)
                    after = module.register_forward_hook(partial(layers.leave, name), always_call=True)
                    stack.callback(before.remove)
                    stack.callback(after.remove)
        yield


def _split_weights(models: Sequence[nn.Module]) -> dict[int, SplitMark]:
    """Return where the weights and biases of parallel layers are split, by identity."""
    weights: dict[int, SplitMark] = {}
    for model in models:
        for path, layer in model.named_modules():
            if not isinstance(layer, ParallelLayer):
                continue
            for name, split in layer.splits.items():
                shard = layer._parameters.get(name)
                if type(shard) is nn.Parameter:
                    dim = split.dim - shard.dim()
                    place = f"{path}.{name}".removeprefix(".")
                    pieces = piece_lengths(split.ranges[layer.group.rank])
                    source = SplitSource(place, shard.size(dim), split.size)
                    # A tied one has the name of its first layer.
                    mark = SplitMark(SplitPart(source, SplitDim(dim, pieces, is_weight=True)))
                    weights.setdefault(id(shard), mark)
    return weights


def _own_buffers(models: Sequence[nn.Module]) -> dict[str, list[Any]]:
    """Return the buffers that have a rank's own numbers."""
    named = (pair for model in models for pair in model.named_buffers())
    buffers = {}
    for name, buffer in named:
        mark = mark_of(buffer)
        if mark is not None and mark.met is not None:
            buffers[f"buffer {name}"] = [buffer]
    return buffers


def _is_compiled(model: nn.Module) -> bool:
    """Return whether a part of a model is compiled: hooks and modes would make its compiler begin again."""
    return any("_orig_mod" in m._modules or m._compiled_call_impl is not None for m in model.modules())


def _values(output: StepOutput) -> dict[str, list[Any]]:
    """Return the tensors and numbers that a step returns, by name; of a pair with its weight the value."""
    if isinstance(output, Mapping):
        by_name = output
    else:
        by_name = {"loss": output}
    values: dict[str, list[Any]] = {}
    for name, value in by_name.items():
        if isinstance(value, SampleRows):
            of_name = value.pieces
        else:
            of_name = value
        values[str(name)] = [v for v in tree_leaves(of_name) if isinstance(v, Tensor | Real)]
    return values


def _meeting(name: str, leaves: Sequence[Any], first: Meeting | None) -> Meeting | None:
    """Return the function by which a returned value is this rank's own, if there is one."""
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            return first  # a number does not know from what it was computed
        mark = mark_of(leaf)
        if mark is None:
            continue
        if mark.met is not None:
            return mark.met
        if mark.part is not None:
            return Meeting(f"the step's {name!r}", mark.part.source)
    return None


def _number(leaves: Sequence[Any]) -> float:
    """Return the sum of all elements, which differs where one of them does."""
    total = 0.0
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            if leaf.is_complex():
                values = torch.view_as_real(leaf)
            else:
                values = leaf
            total += float(values.detach().to_dense().double().nan_to_num(0.0, 0.0, 0.0).sum())
        else:
            total += float(leaf)
    if math.isnan(total):
        return 0.0
    return total


def _limit(leaves: Sequence[Any], by_rank: Sequence[float]) -> float:
    """Return the largest difference that counts as none.

    Ranks compute the same from the same. An accelerator may add in another order each time, which shows in
    the last digits; of 16 bits any other number differs.
    """
    is_coarse = any(isinstance(v, Tensor) and v.dtype in {torch.bfloat16, torch.float16} for v in leaves)
    if is_coarse:
        return 0.0
    return 1e-6 * max(abs(number) for number in by_rank)


def _difference(name: str, by_rank: Sequence[float], met: Meeting | None) -> str:
    values = ", ".join(f"{number:.6g}" for number in by_rank)
    message = f"the ranks that hold a model together return different values of {name!r} ({values}): "
    if met is None:
        return message + _OF_ANOTHER
    return message + meeting_in_words(met) + REMEDY[met.is_weight]


def _taken(fault: OwnInput | None) -> str:
    if fault is None:
        return _OF_ANOTHER
    if not fault.met.function:
        message = (
            f"{fault.layer!r} gets the features of {fault.met.source.layer!r} in another order than its "
            "weight has them: each rank's parts are joined or turned around in between. "
        )
        return message + REMEDY[False]
    into = f", and {fault.layer!r} takes what comes of it"
    return meeting_in_words(fault.met, into) + REMEDY[fault.met.is_weight]


_OF_ANOTHER = "another rank names the function that takes its part of a split output for the whole"
