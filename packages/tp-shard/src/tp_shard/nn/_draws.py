"""Random numbers between column and row layers: a rank's own for split tensors, the same for all others.

Between such layers torch's default generators are in the rank's own state, as in Megatron-LM
(arXiv:1909.08053, appendix B). All that draws there draws the rank's own numbers, kernels and recomputations
of a checkpoint included. After the row layer the generators are restored, one number further if something was
drawn. So the ranks stay in step, even if one of them has more heads or features than another.

A block that draws there is also watched, function by function, for tensors that are not split: dropout of the
block's own input, or one number per sample.
"""

import dis
import functools
import inspect
import sys
from collections.abc import Hashable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from tp_core.compare import functions_named
from tp_core.device_types import is_capturing
from tp_core.errors import ModelError
from tp_core.replicas import is_random_op, not_compiled_alone, untraced

from tp_shard._groups._group import Group
from tp_shard._groups._random import get_state, mixed_seed, set_state
from tp_shard._shards import holds_shard

_SPLIT = "_is_split"
"""The attribute that marks a tensor in a watched block as split, or as the same on all ranks."""
_CPU = torch.device("cpu")

_MADE_BY_SHAPE = functions_named(
    "empty new_empty new_full new_ones new_tensor new_zeros full ones zeros tensor"
)
_DROP_CHANNELS = functions_named(
    "dropout1d dropout2d dropout3d feature_dropout feature_dropout_ feature_alpha_dropout "
    "feature_alpha_dropout_"
)


@dataclass(slots=True)
class _Inside:
    """The default generators between column and row layers: their states before and at the beginning."""

    drawn: int
    before: dict[torch.device, Tensor]
    began: dict[torch.device, Tensor]
    shared: dict[torch.device, Tensor] = field(default_factory=dict)


@dataclass(slots=True)
class _Visit:
    """One call of a block.

    Attributes:
        trains: Whether the block, or a dropout in it, is in training mode.
        mode: The mode that watches the functions that the block calls.
        leading: The sizes of the dimensions before the features: batch, seq.
        inside: The generators, between column and row layers.
        has_drawn: Whether anything was drawn there.
        frame: The frame of the checkpoint, if it recomputes a piece of a block alone.
    """

    trains: bool
    mode: "_Watch | None" = None
    leading: tuple[int, ...] = ()
    inside: _Inside | None = None
    has_drawn: bool = False
    frame: FrameType | None = None


class SplitDraws:
    """The random numbers that a split model draws between its column and row layers.

    Collectives: none.
    """

    def __init__(self, group: Group, seed: int) -> None:
        self._group = group
        self._seed = seed
        self.visits: list[_Visit] = []  # a stack: blocks may contain blocks
        self._has_drawn_replicated = False

    def begin(self, x: Tensor) -> bool:
        """Set the generators to the rank's own state; return whether tensors need marks."""
        self.forget_pieces()
        if not self.visits:
            frame = _checkpoint_frame()
            if frame is None:
                return False
            if self._has_drawn_replicated:
                msg = (
                    "a checkpoint computes a piece of a block again that draws random numbers between its "
                    "column and row layers for what is not split: put the checkpoint around the whole block"
                )
                raise ModelError(msg)
            self.visits.append(_Visit(trains=True, frame=frame))
        visit = self.visits[-1]
        if x.dim():
            visit.leading = tuple(x.shape[:-1])
        # During the capture of a graph the state of its generator cannot be read; fake tensors, with
        # which `trainer.estimate` runs a step, have no values to draw.
        has_values = not isinstance(x, FakeTensor) and not is_capturing(x.device)
        if visit.inside is None and has_values:
            outer = self._inside()
            places = [_CPU] if x.device == _CPU else [_CPU, x.device]
            before = {place: get_state(place, None) for place in places}
            if outer is None:
                drawn = _number()
            else:
                drawn = self._replicated(outer, _number)
            began = {place: self._seeded(place, drawn, self._group.rank) for place in places}
            _set_states(began)
            visit.inside = _Inside(drawn, before, began)
        return self.is_watching

    def end(self) -> None:
        """Restore the generators, one number further if something was drawn."""
        self.forget_pieces()
        visit = self.visits[-1] if self.visits else None
        if visit is None or visit.inside is None:
            return
        inside = visit.inside
        visit.inside = None
        has_drawn = bool(inside.shared) or any(
            not torch.equal(state, get_state(place, None)) for place, state in inside.began.items()
        )
        _set_states(inside.before)
        # Not if nothing was drawn: a model without dropout then draws the numbers of the whole model
        # (`a_block_without_draws_draws_what_the_whole_one_draws`).
        if has_drawn:
            visit.has_drawn = True
            if self._inside() is None:
                _number()

    def forget_pieces(self) -> None:
        """Forget recomputed pieces after their checkpoint has ended; it restores the generators itself."""
        while self.visits:
            frame = self.visits[-1].frame
            if frame is None or frame is _checkpoint_frame():
                return
            self.visits.pop()

    def draw(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a random function in a watched block, and mark its results."""
        tensor = next((v for v in (*args, *kwargs.values()) if isinstance(v, Tensor)), None)
        inside = self._inside()
        if inside is None and tensor is not None and _mark(tensor):  # it is split, before the row layer
            self.begin(tensor)
            inside = self._inside()
        if inside is None or not self._is_replicated(function, tensor, args, kwargs):
            result = function(*args, **kwargs)
            is_split = inside is not None
        else:
            self._has_drawn_replicated = True
            result = self._replicated(inside, lambda: function(*args, **kwargs))
            is_split = False
        results = result if isinstance(result, tuple) else (result,)
        for value in results:
            mark(value, is_split=is_split)
        return result

    @property
    def is_watching(self) -> bool:
        """Return whether a block that is being called is watched."""
        return any(visit.mode is not None for visit in self.visits)

    @property
    def is_inside(self) -> bool:
        """Return whether the generators are in the rank's own state."""
        return self._inside() is not None

    def _inside(self) -> _Inside | None:
        return next((v.inside for v in reversed(self.visits) if v.inside is not None), None)

    def _seeded(self, place: torch.device, drawn: int, rank: int) -> Tensor:
        return torch.Generator(place).manual_seed(mixed_seed(drawn, self._seed, rank)).get_state()

    def _replicated(self, inside: _Inside, function: Any) -> Any:
        """Call a random function with numbers that are the same on all ranks.

        They come from a third state, so that no other draw moves if the ranks take different amounts of them.
        """
        own = {place: get_state(place, None) for place in inside.before}
        _set_states({p: inside.shared.get(p, self._seeded(p, inside.drawn, -1)) for p in own})
        try:
            return function()
        finally:
            inside.shared = {place: get_state(place, None) for place in own}
            _set_states(own)

    def _is_replicated(self, function: Any, tensor: Tensor | None, args: Any, kwargs: dict[str, Any]) -> bool:
        """Return whether a function draws for a tensor that is the same on all ranks."""
        leading = next(v.leading for v in reversed(self.visits) if v.inside is not None)
        is_split = None if tensor is None else _mark(tensor)
        if is_split is False:
            return True
        if tensor is not None and function in _DROP_CHANNELS:  # one number for each sample and channel
            return tuple(tensor.shape[:2]) == leading[:2]
        if is_split:
            return False
        if tensor is None:
            shape = list(_size(args, kwargs))
        else:
            shape = list(tensor.shape)
        while shape and shape[-1] == 1:  # one number per sample, with dimensions of size 1 to broadcast
            shape.pop()
        return tuple(shape) == leading[: len(shape)]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "visits": []}


class BlockDraws:
    """The hooks of a block: the module with a ``forward`` that calls column layers and then row layers."""

    def __init__(self, draws: SplitDraws, block: nn.Module, *, begins: bool) -> None:
        self._draws = draws
        self._begins = begins
        self._rates = [(m, name) for m in block.modules() for name in vars(m) if _is_rate(m, name)]
        with_rate = {id(m) for m, _ in self._rates}
        literal = [(m, _draws_in_code(type(m))) for m in block.modules() if id(m) not in with_rate]  # type: ignore[arg-type]  # a class has a hash
        self._literal = [(m, always) for m, always in literal if always is not None]
        # By mode. Watching costs as much as a small operation for each function that is called. So it ends
        # after the first call in which nothing was drawn, and resumes after the next draw.
        self._is_watched = {True: True, False: True}
        self._has_drawn = {True: False, False: False}  # in a call that was not compiled
        # First of the hooks before, and called after an error too: otherwise the generators would stay in the
        # rank's own state, and the ranks would draw apart from then on.
        block.register_forward_pre_hook(self.enter, with_kwargs=True, prepend=True)
        block.register_forward_hook(self.leave, always_call=True)

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Begin a call of the block."""
        draws = self._draws
        if torch.compiler.is_compiling():
            # The states of generators are no part of a graph: a block with dropout breaks it into several.
            may_draw = any(m.training and getattr(m, name) > 0 for m, name in self._rates) or any(
                m.training or always for m, always in self._literal
            )
            trains = module.training or any(m.training for m, _ in self._rates)
            if may_draw or self._has_drawn[trains]:
                draws.visits.append(_Visit(trains=True))
            return
        draws.forget_pieces()
        visit = _Visit(module.training or any(m.training for m, _ in self._rates))
        inputs = list(_tensors((*args, *kwargs.values())))
        is_watching = draws.is_watching
        if is_watching or self._is_watched[visit.trains]:
            for tensor in inputs:
                if _mark(tensor) is None and not draws.is_inside:
                    mark(tensor, is_split=False)
            for buffer in module.buffers():
                mark(buffer, is_split=False)
        draws.visits.append(visit)
        if self._is_watched[visit.trains] and not is_watching:
            visit.mode = _Watch(draws)
            visit.mode.__enter__()  # type: ignore[no-untyped-call]  # torch's own
        if self._begins and inputs:
            draws.begin(inputs[0])

    def leave(self, _module: nn.Module, _args: tuple[Any, ...], _output: Any) -> None:
        """End a call of the block, also after an error."""
        if not self._draws.visits:
            return
        self._draws.end()
        visit = self._draws.visits.pop()
        if visit.mode is not None:
            visit.mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # torch's own
        self._is_watched[visit.trains] = visit.has_drawn
        if not torch.compiler.is_compiling():
            self._has_drawn[visit.trains] |= visit.has_drawn


class _Watch(TorchFunctionMode):
    """A mode that marks the results of each function in a block: split if one of its inputs is."""

    def __init__(self, draws: SplitDraws) -> None:
        super().__init__()
        self._draws = draws

    @not_compiled_alone
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if is_random_op(func, args, kwargs):
            return self._draws.draw(func, args, kwargs)
        result = func(*args, **kwargs)
        if isinstance(result, Tensor | tuple | list) and func not in _MADE_BY_SHAPE:
            marks = {_mark(tensor) for tensor in _tensors((*args, *kwargs.values()))}
            if marks and (True in marks or None not in marks):
                for tensor in _tensors((result,)):
                    mark(tensor, is_split=True in marks)
        return result


def mark(tensor: Any, *, is_split: bool) -> None:
    """Mark a tensor in a watched block as split, or as the same on all ranks."""
    if isinstance(tensor, Tensor) and not isinstance(tensor, nn.Parameter):  # torch saves their attributes
        setattr(tensor, _SPLIT, is_split)


def _mark(tensor: Tensor) -> bool | None:
    if isinstance(tensor, nn.Parameter):
        return holds_shard(tensor)
    is_split: bool | None = getattr(tensor, _SPLIT, None)
    return is_split


def _tensors(values: Any) -> Any:
    """Yield the tensors among some values and in the tuples and lists among them."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from (inner for inner in value if isinstance(inner, Tensor))


def _is_rate(module: nn.Module, name: str) -> bool:
    """Return whether an attribute is the rate of a dropout."""
    is_number = isinstance(getattr(module, name), int | float) and not isinstance(getattr(module, name), bool)
    return is_number and (
        "drop" in name or (name == "p" and isinstance(module, nn.modules.dropout._DropoutNd))
    )


@functools.cache
def _draws_in_code(kind: Any) -> bool | None:
    """Return whether the methods of a module's class draw, as by ``F.dropout(x, 0.5)``.

    Returns:
        ``None`` if they do not, ``True`` if they draw in evaluation too, as far as their code shows it.
    """
    # By bytecode, as a compiler asks before anything has run: a graph cannot be broken once it is made, and
    # one without draws is to be whole. A draw in a function that a method calls is not seen, and known only
    # after a call that was not compiled. Following functions would find the dropout of each attention in
    # transformers, whatever its rate.
    waiting, seen = ["forward"], {"forward"}
    while waiting:
        method = inspect.unwrap(getattr(kind, waiting.pop()))
        if not inspect.isfunction(method) or method.__module__.startswith("torch.nn.modules.module"):
            continue
        called: Any = None
        for step in dis.get_instructions(method):
            if step.opname in ("CACHE", "EXTENDED_ARG"):
                continue
            if step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
                if called is kind and inspect.isfunction(getattr(kind, step.argval, None)):
                    waiting += {step.argval} - seen
                    seen.add(step.argval)
                owner = Tensor if called is None else called
                called = getattr(owner, step.argval, None)
            elif step.opname.startswith("LOAD_FAST"):
                called = kind if step.argval == "self" else None
            elif step.opname == "LOAD_GLOBAL":
                called = method.__globals__.get(step.argval)
            else:
                called = None
            is_function = callable(called) and isinstance(called, Hashable)
            if is_function and is_random_op(called, method.__code__.co_consts, None):
                return "training" not in method.__code__.co_names
    return None


def _checkpoint_frame() -> FrameType | None:
    """Return the innermost running frame of ``torch.utils.checkpoint``."""
    # From the stack and by file name: torch says neither that it recomputes nor which checkpoint, and tells
    # nobody when one has ended. Without it recomputed dropout would draw other masks:
    # `recomputation_draws_the_same_masks`.
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != torch.utils.checkpoint.__file__:
        frame = frame.f_back
    return frame


@untraced  # it breaks the graph, and the compiler would warn of that at each place
def _number() -> int:
    """Draw a number; the generator is explicit, so that a watched block does not count it as its own draw."""
    return int(torch.randint(2**62, (), dtype=torch.int64, device="cpu", generator=torch.default_generator))


def _set_states(states: dict[torch.device, Tensor]) -> None:
    for place, state in states.items():
        set_state(state, place, None)


def _size(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...]:
    """Return the size argument of a function without tensors."""
    for value in (kwargs.get("size"), *args):
        if isinstance(value, tuple | list):
            return tuple(value)
    return tuple(value for value in args if isinstance(value, int))
