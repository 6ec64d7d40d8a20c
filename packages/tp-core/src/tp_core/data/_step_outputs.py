"""Outputs of training steps: weights, rows, and one output combined from those of the parts."""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils.weak import WeakIdKeyDictionary

from tp_core._contracts._batch import LossReduction, Parts
from tp_core._transfer import recursive_to
from tp_core.data._rows import cat_rows, length_along, take_rows
from tp_core.errors import ConfigError, StepError

# -- Rows of samples ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SampleRows:
    """A value of a step's output with rows: the arguments of a metric, or predictions. They are joined.

    The rows of tensors and arrays are along their first dimension; those of lists are their entries.
    Mappings and tuples contain such values.

    Attributes:
        pieces: The values, in the order of the data.
    """

    pieces: tuple[Any, ...]


def joined_over_parts(values: Sequence[SampleRows], parts: Parts, device: torch.device) -> SampleRows:
    """Return the rows as the step would have returned them for the whole batch.

    Values without a row for each sample of their part (sums, the tokens of all samples) cannot be put into
    another order. They stay one piece for each part.
    """
    pieces = [recursive_to(piece, device) for value in values for piece in value.pieces]
    if [row_count(piece) for piece in pieces] != list(parts.counts):
        return SampleRows(tuple(pieces))
    joined = join_rows(pieces)
    if parts.order is not None:
        place = sorted(range(len(parts.order)), key=parts.order.__getitem__)
        joined = _taken(joined, place)
    return SampleRows((joined,))


def row_count(value: Any) -> int | None:
    """Return the number of rows of ``value``; ``None`` if its leaves have none, or different numbers."""
    lengths = {_length(leaf) for leaf in _leaves(value)}
    if len(lengths) == 1:
        return lengths.pop()
    return None


def join_rows(values: Sequence[Any]) -> Any:
    """Concatenate nested values by their rows.

    Example:
        >>> join_rows([{"name": ["a", "b"]}, {"name": ["c"]}])
        {'name': ['a', 'b', 'c']}

    Raises:
        StepError: The values are not built in the same way, or hold something without rows.
    """
    first = values[0]
    kinds = {Tensor if isinstance(v, Tensor) else type(v) for v in values}
    if len(kinds) == 1 and all(length_along(v) is not None for v in values):
        return cat_rows(values)
    if all(isinstance(v, list) for v in values):
        return [entry for value in values for entry in value]
    if all(isinstance(v, Mapping) and v.keys() == first.keys() for v in values):
        return {key: join_rows([v[key] for v in values]) for key in first}
    if all(isinstance(v, tuple) and len(v) == len(first) for v in values):
        return _like(first, [join_rows(entries) for entries in zip(*values, strict=True)])
    if all(v is None for v in values):
        return None
    described = sorted({_describe_rows(v) for v in values})
    msg = (
        "values of several batches or parts are joined by their rows: give tensors, arrays or lists with "
        f"one row for each sample, alone or in dicts and tuples, and the same ones each time; got {described}"
    )
    raise StepError(msg)


def _taken(value: Any, place: list[int]) -> Any:
    if length_along(value) is not None:
        return take_rows(value, place)
    if isinstance(value, list):
        return [value[i] for i in place]
    if isinstance(value, Mapping):
        return {key: _taken(v, place) for key, v in value.items()}
    if isinstance(value, tuple):
        return _like(value, [_taken(v, place) for v in value])
    return value


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return [leaf for v in value.values() for leaf in _leaves(v)]
    if isinstance(value, tuple) and not isinstance(value, PackedSequence):
        return [leaf for v in value for leaf in _leaves(v)]
    if value is None:
        return []
    return [value]


def _length(leaf: Any) -> int | None:
    if isinstance(leaf, list):
        return len(leaf)
    return length_along(leaf)


def _like(first: tuple[Any, ...], entries: list[Any]) -> tuple[Any, ...]:
    make = getattr(type(first), "_make", tuple)  # named tuples have it
    result: tuple[Any, ...] = make(entries)
    return result


def _describe_rows(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of {value.dim()} dimensions"
    if isinstance(value, Mapping):
        return f"a dict of {sorted(map(str, value))}"
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    return type(value).__name__


# -- One output from those of the parts -----------------------------------------------------------


T = TypeVar("T")


def combine_outputs(
    outputs: Sequence[Any], parts: Parts, *, loss: LossReduction, device: torch.device
) -> Any:
    """Return the output that the step would have returned for the whole batch.

    Losses that are means are averaged; sums are added. Other numbers and scalars are averaged, pairs
    ``(mean, weight)`` by their own weights. Other tensors and `SampleRows` are concatenated, in the order
    that the samples had before the split. ``None`` stays ``None``.

    A part counts by the "weight" that it returned, else by its number of samples. A part of weight 0
    counts nothing: no gradient reaches it, whatever its loss is.

    Raises:
        StepError: The parts returned different things, or what cannot be combined.
    """
    first = outputs[0]
    if not isinstance(first, Mapping):
        combining = _Combining(parts, [float(n) for n in parts.counts], loss, device)
        return combining.value("loss", list(outputs))
    for i, output in enumerate(outputs):
        if not isinstance(output, Mapping) or output.keys() != first.keys():
            msg = f"the step returned {_describe(first)} for part 0 and {_describe(output)} for part {i}"
            raise StepError(msg)
    if "weight" not in first:
        combining = _Combining(parts, [float(n) for n in parts.counts], loss, device)
        return {key: combining.value(key, [o[key] for o in outputs]) for key in first}
    weights = [read_weight(o["weight"]) for o in outputs]
    combining = _Combining(parts, weights, loss, device)
    combined = {key: combining.value(key, [o[key] for o in outputs]) for key in first if key != "weight"}
    return combined | {"weight": sum(weights)}


def restore_order(values: T, order: Sequence[int] | None) -> T:
    """Put concatenated outputs back into the order that the items had before a split by cost.

    Args:
        values: A tensor (rows along dim 0) or a list, with one row per item.
        order: ``.order`` of the parts; ``None`` if the split kept the order.

    Raises:
        ConfigError: ``order`` has another length than ``values``.

    Example:
        >>> restore_order(["b", "c", "a"], (1, 2, 0))
        ['a', 'b', 'c']
    """
    if order is None:
        return values
    length = len(values)  # type: ignore[arg-type]  # a tensor or a list
    if length != len(order):
        msg = f"the order is one of {len(order)} rows, and there are {length}"
        raise ConfigError(msg)
    place = sorted(range(len(order)), key=order.__getitem__)
    if isinstance(values, Tensor):
        return values[torch.tensor(place, device=values.device)]  # type: ignore[return-value]  # T is Tensor
    return type(values)(values[i] for i in place)  # type: ignore[call-arg,index]  # as above


class _Combining(NamedTuple):
    parts: Parts
    weights: Sequence[float]
    loss: LossReduction
    device: torch.device

    def value(self, name: str, values: list[Any]) -> Any:
        is_total = name == "loss" and self.loss == "sum"
        if all(v is None for v in values):
            return None
        if all(isinstance(v, SampleRows) for v in values):
            return joined_over_parts(values, self.parts, self.device)
        if all(isinstance(v, Tensor) for v in values):
            moved = [v.to(self.device) for v in values]
            # A value with one element for a part of one sample is that sample's row.
            are_rows = all(
                v.dim() and len(v) == n == 1 for v, n in zip(moved, self.parts.counts, strict=True)
            )
            if name == "loss" or (all(v.numel() == 1 for v in moved) and not are_rows):
                return _average(moved, self.weights, total=is_total)
            if all(v.dim() for v in moved):
                joined = cat_rows(moved)
                in_order = length_along(joined) == sum(self.parts.counts)
                if in_order:
                    return restore_order(joined, self.parts.order)
                return joined
        elif all(isinstance(v, PackedSequence) for v in values):
            pieces = joined_over_parts([SampleRows((v,)) for v in values], self.parts, self.device).pieces
            return cat_rows(pieces)
        elif all(isinstance(v, Real) for v in values):
            return _average(values, self.weights, total=is_total)
        elif all(isinstance(v, tuple) for v in values):
            pairs = [split_weight(name, v) for v in values]
            weights = [w for _, w in pairs if w is not None]
            means = [m.to(self.device) if isinstance(m, Tensor) else m for m, _ in pairs]
            if all(isinstance(m, Real) or (isinstance(m, Tensor) and m.numel() == 1) for m in means):
                return _average(means, weights, total=False), sum(weights)
        kinds = ", ".join(_describe(v) for v in values)
        msg = (
            f"the step's {name!r} must be a number or a tensor on every part, of one rank, got {kinds}; "
            "return the loss, or a dict with 'loss' and what to log"
        )
        raise StepError(msg)


def _average(values: list[Any], weights: Sequence[float], *, total: bool) -> Any:
    whole = sum(weights)
    if not whole:
        return values[0]  # as on one device: a mean over nothing, which counts nothing
    counted = [(v, w) for v, w in zip(values, weights, strict=True) if w]
    terms = [v if total else v * (w / whole) for v, w in counted]
    return sum(terms[1:], terms[0])


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, Mapping):
        return f"a dict of {sorted(map(str, value))}"
    return f"{type(value).__name__} {value!r:.40}"


def near_power_of_two(number: float) -> float:
    """Return a power of two near ``number``: to multiply a loss or a gradient by it does not round."""
    return math.ldexp(1.0, round(math.log2(number)))


def read_weight(value: Any, *, name: str = "weight") -> float:
    """Return a weight of a step as a number; a tensor on an accelerator is waited for.

    Args:
        value: A number, or a tensor of one element.
        name: The step's name for it, for the message.

    Raises:
        StepError: ``value`` is not a number or scalar tensor, or is negative, NaN or infinite.
    """
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        number = float(value.item())
    elif isinstance(value, Real) and not isinstance(value, bool):
        number = float(value)
    else:
        if isinstance(value, Tensor):
            got = f"a tensor of shape {tuple(value.shape)}"
        else:
            got = repr(value)
        msg = (
            f"the step's {name!r} must be a number or a scalar tensor, over how many units (tokens, pixels, "
            f"samples) its loss and metrics are means; got {got:.200}"
        )
        raise StepError(msg)
    if not 0.0 <= number < math.inf:
        msg = (
            f"the step's {name!r} is {number}, and must be a finite number from 0: over how many units "
            "(tokens, pixels, samples) its loss and metrics are means"
        )
        raise StepError(msg)
    return number


def split_weight(name: str, value: Any) -> tuple[Any, float | None]:
    """Return a metric of a step, and its own weight if it has one: ``(mean, weight)``.

    Raises:
        StepError: ``value`` is a tuple, but not a pair of a mean and a weight.
    """
    if not isinstance(value, tuple):
        return value, None
    if len(value) != 2:
        msg = (
            f"the step's {name!r} must be a number, a scalar tensor, or a pair (mean, weight), got a tuple "
            f"of {len(value)}"
        )
        raise StepError(msg)
    return value[0], read_weight(value[1], name=f"weight of {name}")


# -- Backward passes that add zeros ---------------------------------------------------------------


def drop_gradient(gradient: Tensor) -> Tensor:
    """Return zeros for a gradient: the hook of :func:`zero_backward`."""
    return torch.zeros_like(gradient)


def zero_backward(loss: Tensor, backward: Callable[[Tensor], None]) -> None:
    """Call ``backward`` with a loss that counts nothing, so that zeros are added to the gradients.

    The other ranks wait for this rank's gradients, so it takes part. A loss times 0 is not enough: a mean
    over nothing is NaN, and so is 0 times NaN. Hooks put the zeros where gradients reach the parameters.

    Collective: the one of ``backward``, unchanged.

    Example:
        >>> weight = torch.ones(2, requires_grad=True)
        >>> zero_backward(weight.sum() * float("nan"), torch.Tensor.backward)
        >>> weight.grad
        tensor([0., 0.])
    """
    handles = [leaf.register_hook(drop_gradient) for leaf in _graph_leaves(loss)]
    try:
        backward(loss)
    finally:
        for handle in handles:
            handle.remove()


def _graph_leaves(loss: Tensor) -> list[Tensor]:
    """Return the leaves of a loss's graph to which gradients are added."""
    leaves, seen = [], set()
    nodes = [loss.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)  # of the node that adds to a leaf's gradient
        if variable is not None:
            leaves.append(variable)
        nodes.extend(following for following, _ in node.next_functions)
    return leaves


# -- Steps that were seen before ------------------------------------------------------------------


_numbers: Any = WeakIdKeyDictionary()  # of living objects: a later one may have the id of one that ended
_count = itertools.count()


def step_identity(step: Any, *, unwraps: bool = False) -> object:
    """Return what a step is known by, for a check that is made once for each step.

    Its code, the object of a method, and what it holds of functions, truth values and texts: a function
    within another is a new object in each call, and one with ``use_auxiliary=True`` is another step. Numbers
    may change from step to step, as rates do, and do not count.

    Args:
        step: The step.
        unwraps: Whether a wrapper that returns the same numbers counts as the step in its ``wrapped_step``.
    """
    identity = partial(step_identity, unwraps=unwraps)
    if unwraps and hasattr(step, "wrapped_step"):
        return identity(step.wrapped_step)
    if isinstance(step, partial):
        arguments = (*step.args, *step.keywords.values())
        return step.func, _what_decides(arguments, identity)
    function = getattr(step, "__func__", step)
    code = getattr(function, "__code__", None)
    if code is None:
        return _number_of(step)
    if function is not step:
        owner = _number_of(step.__self__)
    else:
        owner = None
    contents = []
    for cell in function.__closure__ or ():
        try:
            contents.append(cell.cell_contents)
        except ValueError:  # not set yet
            continue
    return code, owner, _what_decides(contents, identity)


def _what_decides(values: Iterable[Any], identity: Callable[[Any], object]) -> tuple[object, ...]:
    """Return what decides among some values what a step computes."""
    identities: list[object] = []
    for value in values:
        if callable(value):
            identities.append(identity(value))
        elif isinstance(value, bool | str):
            identities.append(value)
    return tuple(identities)


def _number_of(value: Any) -> int:
    try:
        number: int = _numbers.setdefault(value, next(_count))
    except TypeError:  # its class takes no weak references
        return id(value)
    return number
