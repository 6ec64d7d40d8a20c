"""A model that is built without its memory, and the initial values that it would have had, one by one.

Large tensors that are made meanwhile lie on the meta device, and what is done to them is recorded, with
the state of the random generator before each draw. Each draw is also made, in memory that is freed at once,
so that the generator continues as it would have. The value of any one tensor is computed from the record,
without the others. So a rank of many takes its slices of a model that no host has room for, and each
element is the one that a model built in one piece would have.

::

    make()  ->  tensors on the meta device, operations  ->  initial_value(tensor): replays what leads to it
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

LEAST_NBYTES = 64 * 2**10
"""Smaller tensors are made at once: they may be looked at, as numbers often are while a model is built."""

_recorders: Any = WeakTensorKeyDictionary()  # of each parameter and buffer without memory


def build_deferred(make: Callable[[], nn.Module], *, least_nbytes: int = LEAST_NBYTES) -> nn.Module:
    """Return ``make()`` with its large parameters and buffers on the meta device.

    Args:
        make: Builds a model on the CPU.
        least_nbytes: From how many bytes on a tensor is large. Smaller ones are made at once.

    An error of ``make`` has a note, since it may do with large tensors what cannot be done without memory.

    Example:
        >>> model = build_deferred(lambda: nn.Linear(1000, 1000))
        >>> model.weight.device.type, initial_value(model.weight).device.type
        ('meta', 'cpu')
    """
    recorder = Recorder(least_nbytes)
    try:
        with recorder, OnTheCpu(recorder):
            model = make()
    except Exception as error:
        if not recorder.is_empty:
            error.add_note(
                "The model was being built without the memory of its parameters. If it can be built as "
                "usual, do that, and give it to prepare() or fit()."
            )
        raise
    for tensor in [*model.parameters(), *model.buffers()]:
        if recorder.knows(tensor):
            _recorders[tensor] = recorder
    return model


def is_deferred(tensor: Tensor) -> bool:
    """Whether a parameter or buffer has no memory yet, and :func:`initial_value` knows its value."""
    return tensor in _recorders


def initial_value(tensor: Tensor) -> Tensor:
    """Return the value that a parameter or buffer of :func:`build_deferred` would have had, on the CPU."""
    value: Tensor = _recorders[tensor].value(tensor)
    return value


def materialize(module: nn.Module, value: Callable[[Tensor], Tensor] = initial_value) -> None:
    """Give the parameters and buffers of a module that have no memory yet theirs, one after the other.

    Args:
        module: The module. Its parameters become others, with the attributes that they had; tied ones stay
            tied.
        value: Returns the value of a parameter or buffer.
    """
    done: dict[int, Tensor] = {}
    for owner in module.modules():
        for held in (owner._parameters, owner._buffers):
            for name, tensor in list(held.items()):
                if tensor is None or not is_deferred(tensor):
                    continue
                if id(tensor) not in done:
                    done[id(tensor)] = _in_place_of(tensor, value(tensor))
                held[name] = done[id(tensor)]  # type: ignore[assignment]  # of the same kind as before


def _in_place_of(tensor: Tensor, real: Tensor) -> Tensor:
    """Return what takes the place of a parameter or buffer, with all that it carries."""
    if isinstance(tensor, nn.Parameter):
        real = nn.Parameter(real, tensor.requires_grad)
    real.__dict__.update(tensor.__dict__)
    return real


# -- operations on tensors without memory, which are recorded and replayed -------------------------


@dataclass(frozen=True, slots=True)
class Ref:
    """A tensor without memory: a view of one storage."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class Operation:
    """What was done.

    Attributes:
        function: torch's operator.
        args: Its arguments, with references in place of tensors without memory.
        kwargs: Its arguments by name.
        generator_state: That of the random generator before; ``None`` where nothing was drawn.
        made: The storages of its results that are new, in their order, with the places among the results.
        reads: The storages that its result depends on.
        writes: The storage that it changed in place, or ``None``.
        overwrites: Whether nothing is left there of what was before.
    """

    function: Any
    args: Any
    kwargs: Any
    generator_state: Tensor | None
    made: tuple[tuple[int, int], ...]
    reads: frozenset[int]
    writes: int | None
    overwrites: bool

    def replay(self, memory: dict[int, Any]) -> None:
        """Do it again.

        Args:
            memory: The storages that have their values, which those made here come to.
        """

        def real(leaf: Any) -> Any:
            return view(memory, leaf) if isinstance(leaf, Ref) else leaf

        args, kwargs = mapped(real, self.args), mapped(real, self.kwargs)
        state = self.generator_state
        if state is None:
            results = self.function(*args, **kwargs)
        elif kwargs.get("generator") is not None:
            generator = torch.Generator()
            generator.set_state(state)
            results = self.function(*args, **kwargs | {"generator": generator})
        else:
            now = torch.get_rng_state()
            torch.set_rng_state(state)
            try:
                results = self.function(*args, **kwargs)
            finally:
                torch.set_rng_state(now)
        found = listed(results)
        for place, storage in self.made:
            memory[storage] = found[place].untyped_storage()


def listed(results: Any) -> Sequence[Any]:
    """Return the results of an operator as a sequence."""
    return results if isinstance(results, list | tuple) else [results]


def view(memory: dict[int, Any], ref: Ref) -> Tensor:
    """Return the tensor that a reference is to, over the memory of its storage."""
    return torch.empty(0, dtype=ref.dtype).set_(memory[ref.storage], ref.offset, ref.size, ref.stride)


# -- the recorder ----------------------------------------------------------------------------------
# Torch's modes are the way in: `torch.utils._python_dispatch`, which torch's notes on extending it describe
# although its name begins with an underscore. A tensor is known by its storage, so views need no record.


_OVERWRITE = frozenset(
    {"uniform_", "normal_", "zero_", "fill_", "copy_", "random_", "exponential_", "log_normal_", "cauchy_"}
)
"""Operations after which nothing of their first argument's value before is left."""


class OnTheCpu(TorchFunctionMode):
    """Has tensors without memory say that they were on the CPU: torch's init leaves others as they are."""

    def __init__(self, recorder: "Recorder") -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func in _SAY_WHERE and self._recorder.knows(args[0]):
            return (
                torch.device("cpu") if func == _SAY_WHERE[1] else False
            )  # made anew each time: not the same one
        return func(*args, **kwargs or {})


_SAY_WHERE = [torch.Tensor.is_meta.__get__, torch.Tensor.device.__get__]  # type: ignore[attr-defined]  # descriptors


class Recorder(TorchDispatchMode):
    """Writes down what is done to large tensors on the CPU, which it gives no memory."""

    def __init__(self, least_nbytes: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as torch has it
        self._least_nbytes = least_nbytes
        self._operations: list[Operation] = []
        self._touched: dict[int, list[int]] = {}  # by storage, the operations that made or changed it
        self._storages: dict[int, Any] = {}  # kept: a storage that is freed gives its number to another

    # -- what is called ------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        with torch._C.DisableTorchFunction():
            return self._call(func, args, kwargs or {})

    def _call(self, func: Any, args: Any, kwargs: Any) -> Any:
        tensors = [leaf for leaf in leaves_in([list(args), kwargs]) if isinstance(leaf, Tensor)]
        deferred = [tensor for tensor in tensors if self._knows(tensor)]
        if not deferred:
            return self._make(func, args, kwargs) if not tensors else func(*args, **kwargs)
        written = _written(func, args)
        goes = kwargs.get("device")
        must_be_real = goes is not None and torch.device(goes).type not in {"cpu", "meta"}
        if must_be_real or (written is not None and not self._knows(written)) or func in _READS_A_VALUE:
            return func(*self._real(list(args)), **self._real(kwargs))
        if torch.Tag.nondeterministic_seeded in func.tags:
            return self._record(func, args, kwargs, written, self._draw(func, args, kwargs, written))
        return self._record(func, args, kwargs, written, None)

    def _make(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return a new tensor: one without memory if it is large."""
        device = kwargs.get("device")
        on_cpu = device is None or torch.device(device).type == "cpu"
        if "device" not in {a.name for a in func._schema.arguments} or not on_cpu:
            return func(*args, **kwargs)
        shapes = func(*args, **kwargs | {"device": torch.device("meta"), "pin_memory": False})
        if not isinstance(shapes, Tensor) or shapes.numel() * shapes.element_size() < self._least_nbytes:
            return func(*args, **kwargs)
        state = None
        if torch.Tag.nondeterministic_seeded in func.tags:
            state = _state_of(kwargs)
            func(*args, **kwargs)
        return self._note(func, args, kwargs, state, None, shapes)

    def _draw(self, func: Any, args: Any, kwargs: Any, written: Tensor | None) -> Tensor:
        """Draw what an operation draws, into memory that is let go, and return the state before."""
        state = _state_of(kwargs)
        others = [t for t in leaves_in([list(args)[1:], kwargs]) if isinstance(t, Tensor) and self._knows(t)]
        if written is not None and written is args[0] and not others:
            memory = torch.empty_strided(written.size(), written.stride(), dtype=written.dtype)
            func(memory, *args[1:], **kwargs)
        else:
            func(*self._real(list(args)), **self._real(kwargs))
        return state

    def _record(self, func: Any, args: Any, kwargs: Any, written: Tensor | None, state: Tensor | None) -> Any:
        """Note an operation on tensors without memory, and return what it returns."""

        def as_meta(leaf: Any) -> Any:
            return leaf.to("meta") if isinstance(leaf, Tensor) and not self._knows(leaf) else leaf

        named = kwargs
        if kwargs.get("device") is not None:
            named = kwargs | {"device": torch.device("meta")}
        shapes = func(*mapped(as_meta, list(args)), **mapped(as_meta, named))
        return self._note(func, args, kwargs, state, written, shapes)

    def _note(
        self, func: Any, args: Any, kwargs: Any, state: Tensor | None, written: Tensor | None, results: Any
    ) -> Any:
        made = []
        for place, result in enumerate(listed(results)):
            if isinstance(result, Tensor) and not self._knows(result):
                key = self._key(result)
                self._storages[key] = result.untyped_storage()
                made.append((place, key))
        if written is None and not made:
            return results  # a view, which is known by its storage
        refs, named = mapped(self._ref, list(args)), mapped(self._ref, kwargs)
        reads = {leaf.storage for leaf in leaves_in([refs, named]) if isinstance(leaf, Ref)}
        target = None if written is None else self._key(written)
        overwrites = (
            written is not None and _covers(written) and func._schema.name.split("::")[1] in _OVERWRITE
        )
        if (
            overwrites
            and target is not None
            and sum(isinstance(leaf, Ref) and leaf.storage == target for leaf in leaves_in([refs, named]))
            == 1
        ):
            reads.discard(target)
        operation = Operation(func, refs, named, state, tuple(made), frozenset(reads), target, overwrites)
        for key in [*(key for _, key in made), *([] if target is None else [target])]:
            self._touched.setdefault(key, []).append(len(self._operations))
        self._operations.append(operation)
        return results

    # -- references ----------------------------------------------------------------------------

    def _key(self, tensor: Tensor) -> int:
        key: int = tensor.untyped_storage()._cdata
        return key

    def _knows(self, tensor: Tensor) -> bool:
        return self._key(tensor) in self._storages

    def _ref(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if not self._knows(leaf):
            return leaf.detach().clone()  # as it is now
        return Ref(
            self._key(leaf),
            leaf.dtype,
            tuple(leaf.size()),
            tuple(leaf.stride()),
            int(leaf.storage_offset()),
        )

    def _real(self, value: Any) -> Any:
        def real(leaf: Any) -> Any:
            return self.value(leaf) if isinstance(leaf, Tensor) and self._knows(leaf) else leaf

        return mapped(real, value)

    # -- values --------------------------------------------------------------------------------

    @property
    def is_empty(self) -> bool:
        """Whether nothing was written down."""
        return not self._operations

    def knows(self, tensor: Tensor) -> bool:
        """Whether the tensor was made meanwhile, and has no memory."""
        return self._knows(tensor)

    def value(self, tensor: Tensor) -> Tensor:
        """Return the value that a tensor would have by now."""
        needed: set[int] = set()
        asked = [(self._key(tensor), len(self._operations))]
        while asked:
            storage, before = asked.pop()
            for number in reversed(self._touched[storage]):
                if number >= before:
                    continue
                operation = self._operations[number]
                if number not in needed:
                    needed.add(number)
                    asked += [(read, number) for read in operation.reads if read != storage]
                if operation.writes != storage:  # it was made here
                    break
                if operation.overwrites:  # what made it gives its memory alone, and yet has to run
                    asked.append((storage, self._touched[storage][0] + 1))
                    break
        memory: dict[int, Any] = {}
        with torch.no_grad():
            for number in sorted(needed):
                self._operations[number].replay(memory)
            return view(memory, self._ref(tensor))


_READS_A_VALUE = frozenset({torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default})


def _written(func: Any, args: Sequence[Any]) -> Tensor | None:
    """Return the tensor that an operator changes in place."""
    for argument, value in zip(func._schema.arguments, args, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, Tensor):
            return value
    return None


def _covers(tensor: Tensor) -> bool:
    return tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()


def _state_of(kwargs: Any) -> Tensor:
    generator = kwargs.get("generator")
    state: Tensor = torch.get_rng_state() if generator is None else generator.get_state()
    return state


# -- nested arguments -------------------------------------------------------------------------------


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """Return a nested value with ``function`` of each leaf."""
    if isinstance(value, list | tuple):
        return type(value)(mapped(function, item) for item in value)
    if isinstance(value, dict):
        return {key: mapped(function, item) for key, item in value.items()}
    return function(value)


def leaves_in(value: Any) -> Iterator[Any]:
    """Yield the leaves of a nested value, in its order."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            yield from leaves_in(item)
    else:
        yield value
