"""Deferred models: built without memory, with initial values that are computed one tensor at a time.

Large tensors are made on the meta device. The operations on them are recorded, with the state of the random
generator before each draw. Each draw is also made, in memory that is freed at once, so that the generator
continues as it would have. The value of any tensor is computed from the record, without the others. So a
rank takes its slices of a model that no host has room for. Each element equals the one of a model that is
built as usual.

::

    make()  ->  tensors on the meta device, operations  ->  initial_value(tensor): replays what leads to it
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from tp_core._trees import containers, tree_leaves, tree_map
from tp_core.modules._user_state import copy_attributes, move_gradient_hooks

LEAST_NBYTES = 64 * 2**10
"""Smaller tensors get memory at once: code that builds a model often reads numbers from small tensors."""

_recorders: Any = WeakTensorKeyDictionary()  # of each parameter and buffer without memory


def build_deferred(make: Callable[[], nn.Module], *, least_nbytes: int = LEAST_NBYTES) -> nn.Module:
    """Return ``make()`` with its large parameters and buffers on the meta device.

    Args:
        make: A function that builds a model on the CPU.
        least_nbytes: The least size of a large tensor. Smaller ones get memory at once.

    An error of ``make`` gets a note, since it may use large tensors in a way that needs memory.

    Example:
        >>> model = build_deferred(lambda: nn.Linear(1000, 1000))
        >>> model.weight.device.type, initial_value(model.weight).device.type
        ('meta', 'cpu')
    """
    recorder = DeferringMode(least_nbytes)
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
    """Return whether a parameter or buffer has no memory yet, but an :func:`initial_value`."""
    return tensor in _recorders


def initial_value(tensor: Tensor) -> Tensor:
    """Return the value that a parameter or buffer of :func:`build_deferred` would have had, on the CPU."""
    value: Tensor = _recorders[tensor].value(tensor)
    return value


def materialize(module: nn.Module, value: Callable[[Tensor], Tensor] = initial_value) -> None:
    """Allocate and fill the deferred parameters and buffers of a module, one after the other.

    Args:
        module: The module. Its parameters are replaced, with their attributes; tied ones stay tied.
        value: A function that returns the value of a parameter or buffer.
    """
    done: dict[int, Tensor] = {}
    for owner in module.modules():
        for tensors in (owner._parameters, owner._buffers):
            for name, tensor in list(tensors.items()):
                if tensor is None or not is_deferred(tensor):
                    continue
                if id(tensor) not in done:
                    done[id(tensor)] = _in_place_of(tensor, value(tensor))
                tensors[name] = done[id(tensor)]  # type: ignore[assignment]  # of the same kind as before


def _in_place_of(tensor: Tensor, real: Tensor) -> Tensor:
    """Return a real tensor in place of a deferred parameter or buffer, with its attributes and hooks."""
    if isinstance(tensor, nn.Parameter):
        real = nn.Parameter(real, tensor.requires_grad)
        move_gradient_hooks(tensor, real)
    copy_attributes(tensor, real)
    return real


# -- recorded operations --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ref:
    """A reference to a tensor without memory, as a view of one storage."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


_ARGUMENTS = containers(stop=lambda cls: cls is Ref)  # a reference is a leaf, though a dataclass


@dataclass(frozen=True, slots=True)
class Operation:
    """One recorded operation.

    Attributes:
        function: torch's operator.
        args: Its arguments, with references in place of tensors without memory.
        kwargs: Its keyword arguments.
        generator_state: The random generator's state before; ``None`` where nothing was drawn.
        made: The position of each new result among the results, and its storage.
        reads: The storages that its result depends on.
        writes: The storage that it changed in place, or ``None``.
        overwrites: Whether it replaced all values of that storage.
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
        """Run the operation again."""

        def real(leaf: Any) -> Any:
            if isinstance(leaf, Ref):
                return view(memory, leaf)
            return leaf

        args = tree_map(real, self.args, table=_ARGUMENTS)
        kwargs = tree_map(real, self.kwargs, table=_ARGUMENTS)
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
        outputs = listed(results)
        for place, storage in self.made:
            memory[storage] = outputs[place].untyped_storage()


def listed(results: Any) -> Sequence[Any]:
    """Return the results of an operator as a sequence."""
    if isinstance(results, list | tuple):
        return results
    return [results]


def view(memory: dict[int, Any], ref: Ref) -> Tensor:
    """Return the tensor of a reference, over the memory of its storage."""
    return torch.empty(0, dtype=ref.dtype).set_(memory[ref.storage], ref.offset, ref.size, ref.stride)


# -- the recorder ---------------------------------------------------------------------------------
# It is a mode of `torch.utils._python_dispatch`, which torch's notes on extending it describe although the
# name begins with an underscore. Tensors are identified by their storage, so views need no record.


_OVERWRITE = frozenset(
    {"uniform_", "normal_", "zero_", "fill_", "copy_", "random_", "exponential_", "log_normal_", "cauchy_"}
)
"""Operations that replace all values of their first argument: earlier operations on it are not replayed."""


class OnTheCpu(TorchFunctionMode):
    """A mode in which deferred tensors report the CPU as their device: torch.nn.init skips meta tensors."""

    def __init__(self, recorder: "DeferringMode") -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func in _SAY_WHERE and self._recorder.knows(args[0]):
            # Compared by value: torch makes a new object for each access to a descriptor.
            if func == _SAY_WHERE[1]:
                return torch.device("cpu")
            return False
        return func(*args, **kwargs or {})


_SAY_WHERE = [torch.Tensor.is_meta.__get__, torch.Tensor.device.__get__]  # type: ignore[attr-defined]  # descriptors


class DeferringMode(TorchDispatchMode):
    """A mode that makes large CPU tensors without memory, and records the operations on them."""

    def __init__(self, least_nbytes: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as torch has it
        self._least_nbytes = least_nbytes
        self._operations: list[Operation] = []
        self._touched: dict[int, list[int]] = {}  # by storage, the operations that made or changed it
        self._storages: dict[int, Any] = {}  # kept alive: a new storage could get the number of a freed one

    # -- recording -----------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        with torch._C.DisableTorchFunction():
            return self._call(func, args, kwargs or {})

    def _call(self, func: Any, args: Any, kwargs: Any) -> Any:
        tensors = [leaf for leaf in tree_leaves([list(args), kwargs]) if isinstance(leaf, Tensor)]
        deferred = [tensor for tensor in tensors if self._knows(tensor)]
        if not deferred:
            if not tensors:
                return self._make(func, args, kwargs)
            return func(*args, **kwargs)
        written = _written(func, args)
        goes = kwargs.get("device")
        must_be_real = goes is not None and torch.device(goes).type not in {"cpu", "meta"}
        if must_be_real or (written is not None and not self._knows(written)) or func in _READS_A_VALUE:
            return func(*self._real(list(args)), **self._real(kwargs))
        if torch.Tag.nondeterministic_seeded in func.tags:
            return self._record(func, args, kwargs, written, self._draw(func, args, kwargs, written))
        return self._record(func, args, kwargs, written, None)

    def _make(self, func: Any, args: Any, kwargs: Any) -> Any:
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
        """Run a random operation in temporary memory, to advance the generator; return the state before."""
        state = _state_of(kwargs)
        others = [
            t for t in tree_leaves([list(args)[1:], kwargs]) if isinstance(t, Tensor) and self._knows(t)
        ]
        if written is not None and written is args[0] and not others:
            memory = torch.empty_strided(written.size(), written.stride(), dtype=written.dtype)
            func(memory, *args[1:], **kwargs)
        else:
            func(*self._real(list(args)), **self._real(kwargs))
        return state

    def _record(self, func: Any, args: Any, kwargs: Any, written: Tensor | None, state: Tensor | None) -> Any:
        """Record an operation on tensors without memory, and return its result on the meta device."""

        def as_meta(leaf: Any) -> Any:
            if isinstance(leaf, Tensor) and not self._knows(leaf):
                return leaf.to("meta")
            return leaf

        named = kwargs
        if kwargs.get("device") is not None:
            named = kwargs | {"device": torch.device("meta")}
        shapes = func(*tree_map(as_meta, list(args)), **tree_map(as_meta, named))
        return self._note(func, args, kwargs, state, written, shapes)

    def _note(
        self, func: Any, args: Any, kwargs: Any, state: Tensor | None, written: Tensor | None, results: Any
    ) -> Any:
        created = []
        for place, result in enumerate(listed(results)):
            if isinstance(result, Tensor) and not self._knows(result):
                key = self._key(result)
                self._storages[key] = result.untyped_storage()
                created.append((place, key))
        if written is None and not created:
            return results  # a view, which is known by its storage
        refs, named = tree_map(self._ref, list(args)), tree_map(self._ref, kwargs)
        leaves = tree_leaves([refs, named], table=_ARGUMENTS)
        storages = [leaf.storage for leaf in leaves if isinstance(leaf, Ref)]
        reads = set(storages)
        target = None if written is None else self._key(written)
        overwrites = (
            written is not None and _covers(written) and func._schema.name.split("::")[1] in _OVERWRITE
        )
        if overwrites and target is not None and storages.count(target) == 1:
            reads.discard(target)
        operation = Operation(func, refs, named, state, tuple(created), frozenset(reads), target, overwrites)
        touched = [key for _, key in created]
        if target is not None:
            touched.append(target)
        for key in touched:
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
            if isinstance(leaf, Tensor) and self._knows(leaf):
                return self.value(leaf)
            return leaf

        return tree_map(real, value)

    # -- values --------------------------------------------------------------------------------

    @property
    def is_empty(self) -> bool:
        return not self._operations

    def knows(self, tensor: Tensor) -> bool:
        return self._knows(tensor)

    def value(self, tensor: Tensor) -> Tensor:
        """Return the value that a tensor would have by now, by a replay of the operations that it needs."""
        needed: set[int] = set()
        pending = [(self._key(tensor), len(self._operations))]
        while pending:
            storage, before = pending.pop()
            for number in reversed(self._touched[storage]):
                if number >= before:
                    continue
                operation = self._operations[number]
                if number not in needed:
                    needed.add(number)
                    pending += [(read, number) for read in operation.reads if read != storage]
                if operation.writes != storage:  # it was made here
                    break
                if operation.overwrites:  # earlier values do not matter, but its memory must be made
                    pending.append((storage, self._touched[storage][0] + 1))
                    break
        memory: dict[int, Any] = {}
        with torch.no_grad():
            for number in sorted(needed):
                self._operations[number].replay(memory)
            return view(memory, self._ref(tensor))


_READS_A_VALUE = frozenset({torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default})


def _written(func: Any, args: Sequence[Any]) -> Tensor | None:
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
