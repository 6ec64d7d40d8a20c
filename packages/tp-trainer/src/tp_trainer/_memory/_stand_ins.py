"""Models, optimizers and batches whose tensors have a shape, a type and a device, and no memory."""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer
from tp_core import tree_map

__all__ = ["StandIns"]


class StandIns:
    """Makes copies of objects with fake tensors, alike ones for one tensor wherever it is met.

    Args:
        device: The device that tensors claim to be on.
        dtype: The type of floating-point parameters and buffers; ``None`` for their own.

    Attributes:
        mode: The mode in which the copies can be computed with.
    """

    def __init__(self, device: torch.device, *, dtype: torch.dtype | None = None) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._device = device
        self._dtype = dtype
        self._copies: dict[int, Any] = {}  # as copy.deepcopy() has it: by the identity of the original

    def of_model(self, model: nn.Module) -> nn.Module:
        """Return a copy of a model, in training mode, without its hooks on parameters."""
        for tensor in [*model.parameters(), *model.buffers()]:
            fake = self.of_tensor(tensor, self._dtype if tensor.is_floating_point() else None)
            is_parameter = isinstance(tensor, nn.Parameter)
            self._copies[id(tensor)] = nn.Parameter(fake, tensor.requires_grad) if is_parameter else fake
        return copy.deepcopy(model, self._copies).train()

    def of_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Return a copy of an optimizer over the parameters of a copied model.

        Hooks are the owner's business, and a scheduler's step counts for the original alone.
        """
        for state in optimizer.state.values():
            for value in state.values():
                if isinstance(value, Tensor):
                    self._copies[id(value)] = self.of_tensor(value) if value.dim() else self._count(value)
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
        """Return a fake tensor that knows its value: optimizers read how many steps there were."""
        value = 1.0 if number.device.type == "meta" else number.item()
        with self.mode:
            return torch.tensor(value, dtype=number.dtype)

    def of_tensor(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return a fake tensor of the same form, on the device."""
        with self.mode:
            return torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=dtype or tensor.dtype, device=self._device
            )
