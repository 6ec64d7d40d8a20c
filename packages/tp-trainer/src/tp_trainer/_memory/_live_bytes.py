"""How much memory a piece of a program would hold, found by running it on tensors that have none.

Tensors are torch's fake ones: shapes, types and devices without values. Below autograd every operator's
results are seen, by their storages, and a storage is gone when nothing refers to it any longer: neither a
variable nor what autograd keeps for the backward pass.
"""

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["LiveBytes"]


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of living storages by kind, and their highest sums.

    A storage is "known" if it was there before (weights, optimizer state), a "gradient" once
    :meth:`note_gradient` was told so, and else a value of the computation.

    Args:
        known: Tensors that are there before, and are not counted.

    Attributes:
        values: Bytes of values at this time.
        gradients: Bytes of gradients at this time.
        casts: Bytes of values that are weights in another type.
        highest_alone: The most bytes of values since :meth:`reset`, without gradients that are being made.
        highest: The most bytes of values since :meth:`reset`.
        highest_with_gradients: The most bytes of both together since then.
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not say
        self.values = self.gradients = self.casts = 0
        self.highest = self.highest_with_gradients = self.highest_alone = self._making = 0
        self.gradient_shapes: set[tuple[int, ...]] = set()  # of what is a gradient that is being made
        self._sizes: dict[int, tuple[int, str]] = {}  # by the address of a living storage
        self._references: dict[int, weakref.ref[Any]] = {}
        self._known = {_address(tensor) for tensor in known}

    def __torch_dispatch__(
        self, operator: Any, _: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator, and note what it returns."""
        outputs = operator(*args, **(kwargs or {}))
        is_cast = operator is torch.ops.aten._to_copy.default and _address(args[0]) in self._known
        for output in outputs if isinstance(outputs, tuple | list) else (outputs,):
            if isinstance(output, Tensor):
                self._note(output, is_cast=is_cast)
        return outputs

    def note_gradient(self, gradient: Tensor | None) -> None:
        """Count a tensor's storage as a gradient from now on."""
        if gradient is None:
            return
        address = _address(gradient)
        size, kind = self._sizes.get(address, (0, "gradient"))
        if kind != "gradient":
            self._add(kind, -size)
            self._add("gradient", size)
            self._sizes[address] = size, "gradient"

    def keep(self, tensors: Iterable[Tensor]) -> int:
        """Take tensors for known from now on, as the state of an optimizer is; return their bytes."""
        total = 0
        for tensor in tensors:
            address = _address(tensor)
            size, kind = self._sizes.pop(address, (0, ""))
            if kind:
                self._references.pop(address)
                self._add(kind, -size)
                self._known.add(address)
                total += size
        return total

    def reset(self) -> None:
        """Forget the highest sums."""
        self.highest, self.highest_with_gradients = self.values, self.values + self.gradients

    def _note(self, tensor: Tensor, *, is_cast: bool) -> None:
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address in self._known or address in self._sizes:
            return
        kind = "cast" if is_cast else "value"
        if tuple(sorted(tensor.shape)) in self.gradient_shapes:
            kind = "making"
        self._sizes[address] = storage.nbytes(), kind
        self._references[address] = weakref.ref(storage, lambda _: self._forget(address))
        self._add(kind, storage.nbytes())

    def _forget(self, address: int) -> None:
        size, kind = self._sizes.pop(address, (0, ""))
        self._references.pop(address, None)
        if kind:
            self._add(kind, -size)

    def _add(self, kind: str, nbytes: int) -> None:
        if kind == "gradient":
            self.gradients += nbytes
        else:
            self.values += nbytes
            self.casts += nbytes if kind == "cast" else 0
            self._making += nbytes if kind == "making" else 0
        self.highest = max(self.highest, self.values)
        self.highest_alone = max(self.highest_alone, self.values - self._making)
        self.highest_with_gradients = max(self.highest_with_gradients, self.values + self.gradients)


def _address(tensor: Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address
