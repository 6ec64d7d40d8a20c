"""What is known of the tensors of a split model while a step runs: which of their dimensions are split.

The marks of split outputs, and of split weights, go through torch's functions by the table of `_split_flow`.
A function that takes a part for the whole leaves its name on what it returns.
"""

import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from tp_core.compare import functions_named
from tp_core.errors import ModelError
from tp_core.replicas import not_compiled_alone

from tp_shard._shards import ParallelLayer, get_parallel_dim, get_parallel_size
from tp_shard._split import Ranges
from tp_shard._split_flow import OperatorCall, SplitDim, TakesPartForWholeError, is_known, splits_after

_MARK = "_split_mark"
"""The attribute of a tensor with a rank's own features, or of what comes of them: its `SplitMark`."""


class SplitSource(NamedTuple):
    """Where a split dimension comes from.

    Attributes:
        layer: The name of the layer that has computed it, or of the weight; empty for a function of tp-shard.
        width: Its size on this rank.
        size: Its size over all ranks; ``None`` if it is not known.
    """

    layer: str
    width: int
    size: int | None


class Meeting(NamedTuple):
    """A function that takes a part for the whole.

    Attributes:
        function: Its name.
        source: Where the part comes from.
        is_weight: Whether that is a layer's weight or bias.
        of_size: Whether it has met the size of the part, and not the part.
    """

    function: str
    source: SplitSource
    is_weight: bool = False
    of_size: bool = False


class SplitPart(NamedTuple):
    """A split dimension of a tensor, and where it comes from."""

    source: SplitSource
    split: SplitDim


class SplitMark(NamedTuple):
    """What is known of a tensor.

    Attributes:
        part: Its split dimension; ``None`` if it is whole, or a function has gone over it.
        met: The function by which it has numbers of this rank's own; ``None`` if all are right.
        digest: A number of what the function made, where that met a split tensor again: it is the same on all
            ranks if the step has joined it.
    """

    part: SplitPart | None
    met: Meeting | None = None
    digest: Tensor | None = None


class OwnInput(NamedTuple):
    """A layer that sums over the ranks, or takes a whole input, and got a rank's own numbers."""

    met: Meeting
    layer: str
    digest: Tensor | None


# -- The size of a split dimension ----------------------------------------------------------------


class _Width(int):
    """The size of a split dimension on this rank, which knows that it is one; so do numbers made of it."""

    source: SplitSource


class _WidthRatio(float):
    source: SplitSource


def _with_source(value: Any, source: SplitSource) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    kind: Any = _Width if isinstance(value, int) else _WidthRatio
    copied = kind(value)
    copied.source = source
    return copied


def _computed(compute: Callable[..., Any], *, is_right: bool = False) -> Callable[..., Any]:
    def method(self: Any, *others: Any) -> Any:
        values = [int(v) if isinstance(v, _Width) else v for v in (self, *others)]
        values = [float(v) if isinstance(v, _WidthRatio) else v for v in values]
        if is_right:
            values.reverse()
        if not all(isinstance(value, int | float) for value in values):
            return NotImplemented
        value = compute(*values)
        if any(isinstance(other, _Width | _WidthRatio) for other in others):
            return value  # two parts have the ratio of the whole sizes
        return _with_source(value, self.source)

    return method


for _kind in (_Width, _WidthRatio):
    for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
        setattr(_kind, f"__{_name}__", _computed(getattr(operator, _name)))
        setattr(_kind, f"__r{_name}__", _computed(getattr(operator, _name), is_right=True))
    setattr(_kind, "__neg__", _computed(operator.neg))  # noqa: B010 - as the others

_SIZES = {Tensor.shape.__get__, Tensor.size}  # type: ignore[attr-defined]  # torch describes it so
_TAKE_SIZES = functions_named(
    "view reshape expand expand_as unflatten flatten repeat zeros ones empty full rand randn randint "
    "new_zeros new_ones new_empty new_full split chunk narrow tensor_split split_with_sizes broadcast_to "
    "size pad interpolate one_hot conv1d conv2d conv3d"
)
"""Functions that take the size of a part as the size of a result, where it is right."""


def _width_among(values: Iterable[Any]) -> _Width | _WidthRatio | None:
    for value in values:
        if isinstance(value, _Width | _WidthRatio):
            return value
        width = None
        if isinstance(value, slice):
            width = _width_among((value.start, value.stop, value.step))
        elif isinstance(value, tuple | list):
            width = _width_among(value)
        if width is not None:
            return width
    return None


# -- The way of marks through functions -----------------------------------------------------------


def _key(tensor: Tensor) -> tuple[Any, ...] | None:
    """Return what tells a tensor from others while they exist, whatever object stands for it.

    A view that autograd returns is another object than the operator's own.
    """
    try:
        place = tensor.untyped_storage().data_ptr()
        return place, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
    except (NotImplementedError, RuntimeError):  # sparse tensors, and those of torch.func, have none
        return None


class _Operators(TorchDispatchMode):
    """A mode in which marks go through the operators of one function of torch.

    Args:
        function: The name of the function.

    Attributes:
        first: The function, and what it took for the whole; ``None`` so far.
    """

    def __init__(self, function: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self._function = function
        self._marks: dict[tuple[Any, ...], SplitMark] = {}
        self._alive: list[Tensor] = []  # or another tensor might get the memory of a marked one
        self.first: Meeting | None = None

    def set(self, tensor: Tensor, mark: SplitMark) -> None:
        key = _key(tensor)
        if key is not None:
            self._marks[key] = mark
            self._alive.append(tensor)

    def get(self, tensor: Tensor) -> SplitMark | None:
        key = _key(tensor)
        if key is None:
            return None
        return self._marks.get(key)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        arguments = _bound(func, args, kwargs)
        is_marked = any(self.get(tensor) is not None for _, tensor in _named_tensors(arguments))
        if is_marked and not is_known(func):
            # In inference an operator comes here as a whole: what it consists of may be known.
            with self:
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        result = func(*args, **kwargs)
        if is_marked:
            self.mark(func, arguments, result)
        return result

    def mark(self, func: Any, arguments: Mapping[str, Any], result: Any) -> None:
        """Mark what an operator has returned, as the table says."""
        marks = {}
        for name, tensor in _named_tensors(arguments):
            mark = self.get(tensor)
            if mark is not None:
                marks[name] = mark
        results = list(_tensors_in([result]))
        for tensor, mark in zip(results, self._after(func, arguments, marks, results), strict=True):
            self.set(tensor, mark)

    def _after(
        self, func: Any, arguments: Mapping[str, Any], marks: Mapping[str, SplitMark], results: list[Tensor]
    ) -> list[SplitMark]:
        met, digest = next(((m.met, m.digest) for m in marks.values() if m.met is not None), (None, None))
        parts = {name: mark.part for name, mark in marks.items() if mark.part is not None}
        if not parts:
            return [SplitMark(None, met, digest)] * len(results)
        source = next(iter(parts.values())).source
        splits = {name: part.split for name, part in parts.items()}
        try:
            after = splits_after(func, OperatorCall(arguments, splits, results))
        except TakesPartForWholeError:
            if met is None and results:
                is_weight = any(split.is_weight for split in splits.values())
                met = Meeting(self._function, source, is_weight)
                self.first = self.first or met
            return [SplitMark(None, met)] * len(results)
        if met is not None and digest is None and not met.of_size:
            own = [t for n, t in _named_tensors(arguments) if n in marks and n not in parts]
            digest = _digest(own[0]) if own else None
        marks_after = []
        for split in after:
            part = None if split is None else SplitPart(source, split)
            marks_after.append(SplitMark(part, met, digest))
        return marks_after


def _bound(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return all arguments of an operator by name, its defaults too."""
    bound = {}
    for at, argument in enumerate(func._schema.arguments):
        if at < len(args):
            bound[argument.name] = args[at]
        elif argument.name in kwargs:
            bound[argument.name] = kwargs[argument.name]
        elif argument.has_default_value():
            bound[argument.name] = argument.default_value
    return bound


def _named_tensors(arguments: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    for name, value in arguments.items():
        if isinstance(value, Tensor):
            yield name, value
        elif isinstance(value, list | tuple):
            yield from ((f"{name}[{i}]", each) for i, each in enumerate(value) if isinstance(each, Tensor))


def _tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors among some values and in the containers among them."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, Mapping):
            yield from _tensors_in(value.values())
        elif isinstance(value, tuple | list):
            yield from _tensors_in(value)


def _digest(tensor: Tensor) -> Tensor | None:
    """Return a number that differs where an element does, in all likelihood."""
    if tensor.is_meta or not tensor.numel():
        return None
    if tensor.is_complex():
        values = torch.view_as_real(tensor)
    else:
        values = tensor
    flat = values.detach().to_dense().double().nan_to_num(0.0, 0.0, 0.0).flatten()
    return flat.dot(torch.arange(1, len(flat) + 1, device=flat.device, dtype=torch.float64).cos())


class OwnNumbers(TorchFunctionMode):
    """A mode that follows split outputs through functions, and what is computed from this rank's part alone.

    Args:
        weights: The marks of the split weights of layers, by identity.

    Attributes:
        first: The first function that took a part for the whole; ``None`` so far.
        faults: The layers that got a rank's own numbers.
        depth: How many layers of tp-shard are running: these know what they do.
    """

    def __init__(self, weights: Mapping[int, SplitMark]) -> None:
        super().__init__()
        self.first: Meeting | None = None
        self.faults: list[OwnInput] = []
        self.depth = 0
        self._weights = weights

    @not_compiled_alone
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling() or self.depth:
            return func(*args, **kwargs)
        marked = []
        for tensor in _tensors_in((*args, *kwargs.values())):
            mark = self._mark(tensor)
            if mark is not None:
                marked.append((tensor, mark))
        width = None
        if func not in _TAKE_SIZES:
            width = _width_among((*args, *kwargs.values()))
        if not marked and width is None:
            return func(*args, **kwargs)
        if func in _SIZES:
            return _sizes(func(*args, **kwargs), *marked[0], *args[1:], **kwargs)
        if _is_called_here():
            return func(*args, **kwargs)
        name = getattr(func, "__name__", str(func))
        with _Operators(name) as operators:
            for tensor, mark in marked:
                operators.set(tensor, mark)
            try:
                result = func(*args, **kwargs)
            except (IndexError, RuntimeError, ValueError) as error:
                met = _first_meeting(name, marked)
                if met is None:
                    raise
                words = f"{type(error).__name__}: {str(error).rstrip('.')}. {meeting_in_words(met)}"
                raise ModelError(words + REMEDY[met.is_weight]) from error
            if func is torch.einsum and isinstance(args[0], str):
                # Its equation says more than the shapes of the products that it becomes.
                operators.first = None
                operators.mark(func, {"equation": args[0], "operands": list(_tensors_in(args[1:]))}, result)
        self.first = self.first or operators.first
        results = list(_tensors_in([result]))
        self._note(operators, args, results)
        if width is not None:
            met = Meeting(name, width.source, of_size=True)
            for tensor in results:
                mark = getattr(tensor, _MARK, None) or SplitMark(None)
                if mark.met is None:
                    setattr(tensor, _MARK, mark._replace(met=met))
        return result

    def _mark(self, tensor: Tensor) -> SplitMark | None:
        return self._weights.get(id(tensor)) or mark_of(tensor)

    def _note(self, operators: _Operators, args: tuple[Any, ...], results: list[Tensor]) -> None:
        """Mark what a function has returned, and what it has written."""
        for tensor in (*_tensors_in(args[:1]), *results):
            mark = operators.get(tensor)
            if mark is not None and id(tensor) not in self._weights and type(tensor) is Tensor:
                setattr(tensor, _MARK, mark)


def _sizes(result: Any, tensor: Tensor, mark: SplitMark, dim: int | None = None) -> Any:
    """Return the size of one dimension, or of all, and mark the size of the split one with its source."""
    if mark.part is None:
        return result
    source = mark.part.source
    place = tensor.dim() + mark.part.split.dim
    if isinstance(result, torch.Size):
        sizes = list(result)
        sizes[place] = _with_source(sizes[place], source)
        return torch.Size(sizes)
    if dim is not None and dim % tensor.dim() == place:
        return _with_source(result, source)
    return result


def _is_called_here() -> bool:
    """Return whether a function is called by tp-shard, which joins what it computes of a part."""
    # From the stack: `depth` counts the layers alone, and any function of this package may be given a part.
    # A decorator on each of them would be missing on the next one, whose own sum would then be a fault.
    frame: FrameType | None = sys._getframe(2)
    passing = {"torch", "tp_core"}
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        # The draws of a block run a user's function, by a mode within this one.
        if name.partition(".")[0] not in passing and name not in {__name__, "tp_shard.nn._draws"}:
            return bool(name.partition(".")[0] == "tp_shard")
        frame = frame.f_back
    return False


def _first_meeting(function: str, marked: Sequence[tuple[Tensor, SplitMark]]) -> Meeting | None:
    """Return what a function that has failed took for the whole, or one before it."""
    for _, mark in marked:
        if mark.met is not None:
            return mark.met
        if mark.part is not None:
            return Meeting(function, mark.part.source, mark.part.split.is_weight)
    return None


def mark_of(tensor: Tensor) -> SplitMark | None:
    if type(tensor) is not Tensor:
        return None
    mark: SplitMark | None = getattr(tensor, _MARK, None)
    if mark is None and get_parallel_dim(tensor) in (1, -1) and tensor.dim():
        return _output_mark("", tensor, SplitDim(-1, (tensor.size(-1),)))
    return mark


def _output_mark(layer: str, tensor: Tensor, split: SplitDim) -> SplitMark:
    source = SplitSource(layer, tensor.size(-1), get_parallel_size(tensor))
    return SplitMark(SplitPart(source, split))


class LayerHooks:
    """The hooks around the parallel layers of a step.

    Args:
        mode: The mode in which the step runs.
    """

    def __init__(self, mode: OwnNumbers) -> None:
        self._mode = mode

    def enter(self, name: str, layer: ParallelLayer, args: Any, kwargs: Any) -> None:
        """Look at a layer's input, before its ``forward``."""
        mode = self._mode
        mode.depth += 1
        if mode.depth > 1 or torch.compiler.is_compiling():
            return
        expected = _pieces_taken(layer)
        for tensor in _tensors_in((*args, *kwargs.values())):
            mark = mark_of(tensor)
            if mark is None:
                continue
            if mark.met is not None:
                digest = mark.digest
                if mark.part is None and not mark.met.of_size:
                    digest = _digest(tensor)
                mode.faults.append(OwnInput(mark.met, name, digest))
            elif mark.part is not None and expected is not None and tensor.size(-1) == sum(expected):
                split = mark.part.split
                if (split.dim, split.pieces) != (-1, expected):
                    mode.faults.append(OwnInput(Meeting("", mark.part.source), name, None))

    def leave(self, name: str, layer: ParallelLayer, _args: Any, output: Any) -> None:
        """Mark a layer's output, after its ``forward``."""
        self._mode.depth -= 1
        if self._mode.depth or torch.compiler.is_compiling():
            return
        for tensor in _tensors_in([output]):
            if type(tensor) is not Tensor:
                continue
            if hasattr(tensor, _MARK):
                delattr(tensor, _MARK)
            if tensor.dim() and get_parallel_dim(tensor) in (1, -1):
                split = _split_made(layer, tensor)
                if split is not None:
                    setattr(tensor, _MARK, _output_mark(name, tensor, split))


def _split_made(layer: ParallelLayer, output: Tensor) -> SplitDim | None:
    """Return the split dimension of a layer's output; ``None`` if all ranks have all of it."""
    split = layer.splits.get("weight")
    width = output.size(-1)
    if split is None or split.local_size(layer.group.rank) != width:
        return SplitDim(-1, (width,))
    own = split.ranges[layer.group.rank]
    shared = tuple(all(piece in ranges for ranges in split.ranges) for piece in own)
    if not any(shared):
        shared = ()
    return SplitDim(-1, piece_lengths(own), shared=shared).taken(0, width)


def _pieces_taken(layer: ParallelLayer) -> tuple[int, ...] | None:
    """Return the pieces of features that a layer takes; ``None`` if it takes all."""
    split = layer.splits.get("weight")
    if layer.dim != 0 or split is None or isinstance(layer, nn.Embedding):
        return None
    return piece_lengths(split.ranges[layer.group.rank])


def piece_lengths(ranges: Ranges) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in ranges)


# -- In words ----------------------------------------------------------------------------------------


REMEDY = {
    False: "Give the layer gather_output=True, or join the output with ts.distributed.gather(); for a loss "
    "over classes take ts.nn.functional.parallel_cross_entropy()",
    True: "Call the layer, join the results with ts.distributed.reduce() or gather(), or leave the layer "
    "whole",
}


def meeting_in_words(met: Meeting, into: str = "") -> str:
    layer, width, size = met.source
    of = "" if size is None else f" of {size}"
    if met.is_weight:
        return (
            f"{met.function} computes with {layer!r} outside of its layer, and takes the {width}{of} rows or "
            f"columns of this rank for all of them{into}. "
        )
    output = f"the output of {layer!r}" if layer else "an output"
    if met.of_size:
        return (
            f"{met.function} has a number from the shape of {output}, which is split, and takes the "
            f"{width}{of} features of this rank for all of them{into}. "
        )
    return (
        f"{met.function} has {output}, which is split, and takes the {width}{of} features of this rank for "
        f"all of them{into}. "
    )
