"""What is done to large tensors while a model is built: written down, and done again for the value of one.

Torch's modes are the way in: `torch.utils._python_dispatch`, which torch's notes on extending it describe
although its name begins with an underscore. A tensor is known by its storage, so views need no record.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tp_core._tensors._nested import leaves_in, mapped
from tp_core._tensors._operations import Operation, Ref, listed, view

__all__ = ["OnTheCpu", "Recorder"]


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
