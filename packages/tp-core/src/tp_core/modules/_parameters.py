"""The parameters of a user's model: their names, which of them are parts of larger ones, checks of them."""

import functools
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from tp_core.errors import ModelError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


# -- Names in a model as its author wrote it, whatever has been compiled since --------------------


_COMPILED = "_orig_mod"
"""The name under which ``torch.compile(module)`` holds the module; it is part of every name in its state."""


def plain_name(name: str) -> str:
    """Return a name without what ``torch.compile`` puts into it.

    Example:
        >>> plain_name("_orig_mod.head._orig_mod.weight")
        'head.weight'
    """
    if _COMPILED in name:
        return ".".join(part for part in name.split(".") if part != _COMPILED)
    return name


def plain_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model's state under plain names."""
    return {plain_name(name): value for name, value in state.items()}


def with_own_names(model: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state under the names that the model itself has now, with compiled parts or without."""
    own = {plain_name(name): name for name in model.state_dict(keep_vars=True)}
    return {own.get(name, name): value for name, value in plain_state(state).items()}


def named_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters under all of their plain names: a tied one has several."""
    return {plain_name(name): p for name, p in model.named_parameters(remove_duplicate=False)}


# -- Kinds of parameters ---------------------------------------------------------------------------


SHARDED_ATTRIBUTE = "tp_sharded"
"""A parameter with this attribute set to true holds one shard of a larger one."""


def is_dtensor(tensor: torch.Tensor) -> "TypeGuard[DTensor]":
    """Return whether a tensor is a DTensor; by an attribute, since importing the class is slow."""
    return hasattr(tensor, "device_mesh")


def is_sharded(parameter: torch.Tensor) -> bool:
    """Return whether a parameter is one rank's shard: a DTensor, or marked with ``tp_sharded``."""
    return bool(getattr(parameter, SHARDED_ATTRIBUTE, False)) or is_dtensor(parameter)


def norm_dtype(parameters: Iterable[torch.Tensor]) -> torch.dtype:
    """Return the dtype of the norm of the gradients of parameters, the same on all ranks that have these.

    By the trained ones, whether they have a gradient here or not: a rank that has none would round a norm to
    another dtype than the others, and scale its gradients differently.
    """
    dtypes = {parameter.dtype.to_real() for parameter in parameters if parameter.requires_grad}
    if dtypes:
        return functools.reduce(torch.promote_types, dtypes)
    return torch.float32


def quantized_parts(tensor: torch.Tensor) -> list[torch.Tensor] | None:
    """Return the plain tensors of which a quantized one consists, such as integers and scales, or ``None``.

    That is a tensor of a class that wraps others, as those of torchao do; DTensors are none.
    """
    if is_dtensor(tensor):
        flatten = None
    else:
        flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return None
    inner = [getattr(tensor, name) for name in flatten()[0]]
    return [part for inner_tensor in inner for part in quantized_parts(inner_tensor) or [inner_tensor]]


def is_quantized(parameter: torch.Tensor) -> bool:
    """Return whether a parameter has integers and scales; bitsandbytes keeps scales in its attributes."""
    return quantized_parts(parameter) is not None or type(parameter).__module__.startswith("bitsandbytes.")


def check_not_quantized(model: torch.nn.Module, backend: str) -> None:
    """Check that no weight is quantized, for a backend that cuts weights."""
    for name, parameter in model.named_parameters():
        if is_quantized(parameter):
            msg = (
                f"the model's {name!r} is quantized ({type(parameter).__name__}), and {backend} cannot cut "
                "its integers and scales: train adapters over it on the backend 'single' or 'ddp', or load "
                "the base in floating point (bfloat16)"
            )
            raise ModelError(msg)


def check_initialized(model: torch.nn.Module) -> None:
    """Check that every parameter and buffer has a shape."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            msg = (
                f"the model's {name!r} has no shape yet: it is of a lazy module, which takes it from its "
                "first batch; call the model on one before it is given, and make the optimizer after that"
            )
            raise ModelError(msg)


def check_no_first_fsdp(model: torch.nn.Module) -> None:
    """Check that no module of a model is wrapped by torch's first FSDP."""
    # Where it is not imported, no module can be wrapped, and the import takes long.
    torch_fsdp = sys.modules.get("torch.distributed.fsdp")
    if torch_fsdp is None:
        return
    for name, module in model.named_modules():
        if isinstance(module, torch_fsdp.FullyShardedDataParallel):
            what = f"its {name!r}" if name else "it"
            msg = (
                f"the model is wrapped already: {what} is a FullyShardedDataParallel, torch's first FSDP, "
                "with flat parameters that no other backend and no checkpoint of here reads; give the plain "
                "module, which backend 'fsdp' shards"
            )
            raise ModelError(msg)


def check_no_max_norm(model: torch.nn.Module, who: str) -> None:
    """Check that no embedding writes its weight while it looks rows up."""
    for name, module in model.named_modules():
        is_embedding = isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag)
        if is_embedding and module.max_norm is not None and module.weight.requires_grad:
            what = f"the model's {name!r}" if name else "the model"
            msg = (
                f"{what} ({type(module).__name__}) has max_norm={module.max_norm}, which scales rows of the "
                f"weight while they are looked up: {who} would scale those of its own part of the batch, and "
                "the weights would part. Make it without max_norm, and scale all rows after each optimizer "
                "step, where the weight is whole: "
                f"weight.data = torch.renorm(weight.data, {module.norm_type:g}, 0, {module.max_norm:g})"
            )
            raise ModelError(msg)


# -- Parts of a larger tensor ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """This rank's slice of a larger tensor: one or several rectangular parts of it.

    Attributes:
        shape: The shape of the whole tensor.
        parts: The offsets of each part in every dimension, and the part; reading writes into it.

    Example:
        >>> rows = torch.zeros(2, 3)
        >>> TensorSlice((5, 3), [((3, 0), rows)])  # doctest: +SKIP
    """

    shape: tuple[int, ...]
    parts: Sequence[tuple[tuple[int, ...], Tensor]]

    def part_at(self, offsets: Sequence[int]) -> Tensor:
        """Return the part that begins at ``offsets``."""
        return next(part for start, part in self.parts if tuple(start) == tuple(offsets))

    # torch.distributed.checkpoint calls this method of objects that are no tensors.
    def __create_write_items__(self, fqn: str, _object: object) -> list[Any]:
        from torch.distributed.checkpoint.metadata import (
            ChunkStorageMetadata,
            MetadataIndex,
            TensorProperties,
        )
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        return [
            WriteItem(
                index=MetadataIndex(fqn, start),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(offsets=torch.Size(start), sizes=part.size()),
                    properties=TensorProperties.create_from_tensor(part),
                    size=torch.Size(self.shape),
                ),
            )
            for start, part in self.parts
            if part.numel()
        ]


def fill_from_whole(target: Tensor | TensorSlice, value: Tensor) -> None:
    """Fill a tensor, or a rank's slice of it, with its part of a whole one.

    Args:
        target: The target, filled in place: a tensor of the shape of ``value``, or parts of one.
        value: The whole tensor, of any type and on any device.
    """
    for start, part in local_parts(target):
        place = tuple(slice(a, a + n) for a, n in zip(start, part.shape, strict=True))
        part.copy_(value[place])


def local_parts(tensor: Tensor | TensorSlice) -> Sequence[tuple[tuple[int, ...], Tensor]]:
    """Return this rank's parts of a tensor: the offsets of each in the whole, and its memory."""
    if isinstance(tensor, TensorSlice):
        return tensor.parts
    if not is_dtensor(tensor):
        return [((0,) * tensor.dim(), tensor.detach())]
    # torch.distributed.checkpoint calls this method of DTensors.
    (chunk,) = tensor.__create_chunk_list__()
    return [(tuple(chunk.offsets), tensor.to_local().detach())]


def whole(tensor: Tensor) -> Tensor:
    """Return the whole value of a DTensor, or of an object with ``full_tensor``; others as they are.

    Collective: those of ``full_tensor``: every rank must call it.
    """
    if not is_dtensor(tensor):
        put_together: Callable[[], Tensor] | None = getattr(tensor, "full_tensor", None)
        if put_together is None:
            return tensor
        return put_together()
    device = tensor.device_mesh.device_type
    # With offload the host keeps the parts, and the ranks' group communicates on the device only.
    on_device: Any = tensor if tensor.device.type == device else tensor.to(device)
    full: Tensor = on_device.full_tensor()
    return full
