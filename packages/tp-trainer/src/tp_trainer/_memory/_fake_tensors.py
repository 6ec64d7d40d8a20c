"""Fake tensors in place of a job's own, and the bytes that live on them in a computation."""

import copy
import math
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from tp_core import tree_leaves, tree_map
from tp_core.device_types import memory_block
from tp_core.tensors import copy_attributes


class StandIns:
    """Copies objects with fake tensors; all occurrences of a tensor become the same fake tensor.

    Args:
        device: The device of the fake tensors.
        dtype: The type of floating-point parameters and buffers; ``None`` for their own.
        buffers: Whether buffers have that type, too.

    Attributes:
        mode: The mode in which to compute with the copies.
    """

    def __init__(
        self, device: torch.device, *, dtype: torch.dtype | None = None, buffers: bool = True
    ) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._device = device
        self._dtype = dtype
        self._buffers = buffers
        self._copies: dict[int, Any] = {}  # the memo of copy.deepcopy(): by the id of the original

    def of_model(self, model: nn.Module) -> nn.Module:
        """Return a copy of a model, in training mode, without its hooks on parameters."""
        for tensor in [*model.parameters(), *model.buffers()]:
            is_parameter = isinstance(tensor, nn.Parameter)
            is_converted = tensor.is_floating_point() and (is_parameter or self._buffers)
            dtype = self._dtype if is_converted else None
            fake = self.of_tensor(tensor, dtype)
            if is_parameter:
                self._copies[id(tensor)] = nn.Parameter(fake, tensor.requires_grad)
            else:
                self._copies[id(tensor)] = fake
            copy_attributes(tensor, self._copies[id(tensor)])
        return copy.deepcopy(model, self._copies).train()

    def of_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Return a copy of an optimizer over the parameters of a copied model.

        The copy has no hooks, and not the step() that a scheduler has wrapped: its counter belongs to the
        original.
        """
        for state in optimizer.state.values():
            for value in state.values():
                if isinstance(value, Tensor):
                    if value.dim():
                        self._copies[id(value)] = self.of_tensor(value)
                    else:
                        self._copies[id(value)] = self._count(value)
        new: Optimizer = object.__new__(type(optimizer))
        left_out = {name for name in vars(optimizer) if name == "step" or "_hooks" in name}
        kept = {name: value for name, value in vars(optimizer).items() if name not in left_out}
        vars(new).update(copy.deepcopy(kept, self._copies))
        vars(new).update({name: type(vars(optimizer)[name])() for name in left_out if name != "step"})
        return new

    def of_batch(self, batch: Any) -> Any:
        """Return a copy of nested values."""
        return tree_map(lambda leaf: self.of_tensor(leaf) if isinstance(leaf, Tensor) else leaf, batch)

    def _count(self, number: Tensor) -> Tensor:
        """Return a fake tensor with a known value: optimizers read their number of steps."""
        value = 1.0 if number.device.type == "meta" else number.item()
        with self.mode:
            return torch.tensor(value, dtype=number.dtype)

    def of_tensor(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return a fake tensor of the same shape and strides, on the device."""
        with self.mode:
            return torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=dtype or tensor.dtype, device=self._device
            )


# that autograd has saved refers to them any longer.


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of living storages by kind, and their peaks.

    A storage is "known" if it existed before (weights, optimizer state). It is a "gradient" after
    :meth:`note_gradient`, and otherwise a value of the computation.

    Args:
        known: Tensors that existed before, and are not counted.
        block: The bytes of which the device's allocator hands out multiples.

    Attributes:
        block: As given.
        values: The current bytes of values.
        gradients: The current bytes of gradients.
        casts: The bytes of values that are weights in another type.
        highest_alone: The peak of values since :meth:`reset`, without gradients under computation.
        highest: The peak of values since :meth:`reset`.
        highest_with_gradients: The peak of both together since then.
        timeline: See :class:`tp_core.jobs.Footprint`.
        is_forward: Whether attentions are counted: those that the backward pass computes again are not.
        keys: The bytes of keys and values of all calls of torch's attention.
        attentions: The number of these calls.
        attention: See :class:`tp_core.jobs.Footprint`.
        events: The blocks in their order, as in the traces of :class:`tp_core.jobs.Footprint`.
    """

    def __init__(self, known: Iterable[Tensor], *, block: int = 1) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not say
        self.block = block
        self.is_forward = True
        self.keys = self.attentions = 0
        self.attention: dict[str, int | str] = {}
        self.values = self.gradients = self.casts = 0
        self.highest = self.highest_with_gradients = self.highest_alone = self._making = 0
        self.timeline: dict[str, list[int]] = {}
        self._peak = self._peak_making = 0  # since the last gradient
        self.gradient_shapes: set[tuple[int, ...]] = set()  # of gradients under computation
        self.events: list[list[Any]] = []
        self._allocations: dict[int, list[Any]] = {}  # the event of each living storage, by its address
        self._sizes: dict[int, tuple[int, str]] = {}  # by the address of a living storage
        self._references: dict[int, weakref.ref[Any]] = {}
        self._addresses = {_address(tensor) for tensor in known}

    def __torch_dispatch__(
        self, operator: Any, _: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator, and count the storages of its outputs."""
        outputs = operator(*args, **(kwargs or {}))
        if self.is_forward and "scaled_dot_product" in str(operator):
            self.attentions += 1
            self.keys += sum(t.numel() * t.element_size() for t in args[1:3])
            self._note_attention(operator, args, kwargs or {})
        is_cast = operator is torch.ops.aten._to_copy.default and _address(args[0]) in self._addresses
        if isinstance(outputs, tuple | list):
            several = outputs
        else:
            several = (outputs,)
        for output in several:
            if isinstance(output, Tensor):
                self._note(output, is_cast=is_cast)
        return outputs

    def _note_attention(self, operator: Any, args: Any, kwargs: dict[str, Any]) -> None:
        names = [argument.name for argument in operator._schema.arguments]
        named = dict(zip(names, args, strict=False)) | kwargs
        query, key, value = args[:3]
        mask = named.get("attn_mask", named.get("attn_bias"))
        call: dict[str, int | str] = {
            "dtype": str(query.dtype).removeprefix("torch."),
            "features": query.size(-1),
            "value_features": value.size(-1),
            "mask": "" if mask is None else str(mask.dtype).removeprefix("torch."),
            "dropout": int(named.get("dropout_p", 0) > 0),
            "queries": query.size(-2),
            "row": math.prod(query.shape[:-2]) * key.size(-2) * 4,
        }
        largest = self.attention
        if not largest or (call["mask"] != "", call["row"]) > (largest["mask"] != "", largest["row"]):
            self.attention = call

    def note_gradient(self, gradient: Tensor | None, name: str) -> None:
        """Count the storage of a parameter's gradient as one from now on."""
        if gradient is None:
            return
        address = _address(gradient)
        allocation = self._allocations.get(address)
        if allocation is None:
            self.note("gradient", -1, 0, name)
        else:
            allocation[0] = "fixed"
            self.note("gradient", allocation[1], allocation[2], name)
        size, kind = self._sizes.get(address, (0, "gradient"))
        # A bias may have its gradient while a larger one is made, which the peak beside it belongs to.
        others = self._making - (size if kind == "making" else 0)
        if kind != "gradient":
            self._add(kind, -size)
            self._add("gradient", size)
            self._sizes[address] = size, "gradient"
        kept = self.values - self._making
        beside = 0 if others > size else self._peak_making
        self.timeline[name] = [self._peak, beside, kept]
        self._peak, self._peak_making = kept, self._peak_making - beside

    def keep(self, tensors: Iterable[Tensor]) -> int:
        """Count tensors as known from now on, for an optimizer's state; return their bytes."""
        total = 0
        for tensor in tensors:
            address = _address(tensor)
            size, kind = self._sizes.pop(address, (0, ""))
            if kind:
                self._references.pop(address)
                self._allocations.pop(address)[0] = "state"
                self._add(kind, -size)
                self._addresses.add(address)
                total += size
        return total

    def note(self, what: str, number: int = -1, nbytes: int = 0, name: str = "") -> None:
        """Add an event."""
        self.events.append([what, number, nbytes, name])

    def reset(self) -> None:
        """Reset the peaks."""
        self.highest, self.highest_with_gradients = self.values, self.values + self.gradients

    def _note(self, tensor: Tensor, *, is_cast: bool) -> None:
        # _cdata is private: the data_ptr() of fake storages does not distinguish them.
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address in self._addresses or address in self._sizes:
            return
        kind = "cast" if is_cast else "value"
        if tuple(sorted(tensor.shape)) in self.gradient_shapes:
            kind = "making"
        nbytes = round_up(storage.nbytes(), self.block)
        self._sizes[address] = nbytes, kind
        self._references[address] = weakref.ref(storage, lambda _: self._forget(address))
        self.note("value" if kind == "value" else "fixed", len(self.events), nbytes)
        self._allocations[address] = self.events[-1]
        self._add(kind, nbytes)

    def _forget(self, address: int) -> None:
        size, kind = self._sizes.pop(address, (0, ""))
        self._references.pop(address, None)
        allocation = self._allocations.pop(address, None)
        if allocation is not None:
            self.note("free", allocation[1])
        if kind:
            self._add(kind, -size)

    def _add(self, kind: str, nbytes: int) -> None:
        if kind == "gradient":
            self.gradients += nbytes
        else:
            self.values += nbytes
            if kind == "cast":
                self.casts += nbytes
            if kind == "making":
                self._making += nbytes
        self.highest = max(self.highest, self.values)
        alone = self.values - self._making
        self.highest_alone, self._peak = max(self.highest_alone, alone), max(self._peak, alone)
        if self._making:
            self._peak_making = max(self._peak_making, alone)
        self.highest_with_gradients = max(self.highest_with_gradients, self.values + self.gradients)


def _address(tensor: Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address


def tensors_in(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def block_of(device: torch.device | None) -> int:
    """Return the bytes of which the allocator of a device hands out multiples; without one, the CPU's."""
    return memory_block("cpu" if device is None else device.type)


def round_up(nbytes: int, block: int) -> int:
    return -(-nbytes // block) * block


def nbytes_of(tensors: Iterable[Tensor], dtype: torch.dtype | None = None, *, block: int = 1) -> int:
    """Return the bytes of tensors, with a dtype as if those of floats had it; repeated ones count once.

    Args:
        tensors: The tensors.
        dtype: The dtype.
        block: Of how many bytes each one takes multiples.
    """
    nbytes = 0
    for tensor in {id(t): t for t in tensors}.values():
        size = tensor.element_size()
        if dtype is not None and tensor.is_floating_point():
            size = dtype.itemsize
        nbytes += round_up(tensor.numel() * size, block)
    return nbytes
