"""Copy many tensors to another device in few transfers."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.parallel.comm import broadcast

__all__ = ["copy_coalesced", "move_coalesced", "move_in_buckets"]

BUCKET_NBYTES = 32 * 2**20
"""A bucket is one transfer. Larger ones win nothing and need as much memory on both sides."""


def move_coalesced(
    tensors: Sequence[Tensor], device: torch.device, *, force_flat: bool = False
) -> list[Tensor]:
    """Return the tensors on ``device``: differentiable, and themselves where they are there.

    Small ones of one type travel together, in one flat tensor.

    Args:
        tensors: What to move.
        device: Where to.
        force_flat: Lay those that are there in flat tensors too, for tests with one device.
    """
    moved = list(tensors)
    for bucket, arrived in move_in_buckets(tensors, device, force_flat=force_flat):
        for i, tensor in zip(bucket, arrived, strict=True):
            moved[i] = tensor
    return moved


def move_in_buckets(
    tensors: Sequence[Tensor], device: torch.device, *, force_flat: bool = False
) -> Iterator[tuple[list[int], list[Tensor]]]:
    """Yield what `move_coalesced` moves, transfer by transfer: positions, and tensors on ``device``."""
    for bucket in _buckets(tensors, device, force_flat=force_flat):
        members = [tensors[i] for i in bucket]
        if len(bucket) == 1:
            yield bucket, [_to(members[0], device)]
        else:
            yield bucket, _pieces(_to(_flat(members), device), members)


@torch.no_grad()
def copy_coalesced(
    rows: Sequence[Sequence[Tensor]], sources: Sequence[Tensor], *, force_flat: bool = False
) -> None:
    """Copy each source into its target of each row in place; the targets of a row are on one device.

    What goes to several CUDA devices goes to all of them at once, by torch's own broadcast.
    """
    if not sources:
        return
    plain = [source.detach() for source in sources]
    devices = [row[0].device for row in rows]
    near = [d for d in devices if d == plain[0].device and not force_flat]
    for row, device in zip(rows, devices, strict=True):
        if device in near:
            torch._foreach_copy_(list(row), plain)
    far = [(row, d) for row, d in zip(rows, devices, strict=True) if d not in near]
    if not far:
        return
    # Which tensors travel together does not depend on where they go.
    for bucket in _buckets(plain, far[0][1], force_flat=force_flat):
        members = [plain[i] for i in bucket]
        whole = members[0] if len(bucket) == 1 else _flat(members)
        arrived = _spread(whole, [device for _, device in far])
        for (row, _), tensor in zip(far, arrived, strict=True):
            pieces = [tensor] if len(bucket) == 1 else _pieces(tensor, members)
            torch._foreach_copy_([row[i] for i in bucket], pieces)  # one kernel for all of them


def _spread(tensor: Tensor, devices: Sequence[torch.device]) -> list[Tensor]:
    """Return the tensor on each of the devices."""
    others = [d for d in dict.fromkeys(devices) if d != tensor.device]
    if len(others) > 1 and tensor.is_cuda and all(d.type == "cuda" for d in others):
        # One after the other they would wait in the stream of the device that they come from.
        copies = broadcast(tensor, [tensor.device, *others])
        found = dict(zip([tensor.device, *others], copies, strict=True))
        return [found[d] for d in devices]
    return [_to(tensor, d) for d in devices]


def _to(tensor: Tensor, device: torch.device) -> Tensor:
    # A copy to the CPU that is not waited for would be read before it is there.
    return tensor.to(device, non_blocking=device.type != "cpu")


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    """Return all values in one vector, each tensor's in the order of its memory."""
    return torch.cat([_in_order(t).reshape(-1) for t in tensors])


def _pieces(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Undo `_flat`, with the strides that the tensors have: kernels for many tensors need equal ones."""
    pieces = []
    for piece, tensor in zip(torch.split(flat, [t.numel() for t in like]), like, strict=True):
        order = _order(tensor)
        if order is None:
            pieces.append(piece.view(tensor.shape))
        else:
            places = sorted(range(len(order)), key=order.__getitem__)
            pieces.append(piece.view([tensor.shape[d] for d in order]).permute(places))
    return pieces


def _in_order(tensor: Tensor) -> Tensor:
    order = _order(tensor)
    return tensor if order is None else tensor.permute(order)


def _order(tensor: Tensor) -> list[int] | None:
    """Return the dimensions as they lie in memory, outermost first; ``None`` if that is their own order.

    Also where there are gaps: such tensors are laid out anew.
    """
    if tensor.is_contiguous():
        return None
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return order if tensor.permute(order).is_contiguous() else None


def _buckets(tensors: Sequence[Tensor], device: torch.device, *, force_flat: bool) -> Iterator[list[int]]:
    """Yield the positions of tensors that travel together, of those that have to travel."""
    open_buckets: dict[tuple[torch.dtype, torch.device], tuple[list[int], int]] = {}
    for i, tensor in enumerate(tensors):
        if tensor.device == device and not force_flat:
            continue
        nbytes = tensor.numel() * tensor.element_size()
        if tensor.layout is not torch.strided or nbytes >= BUCKET_NBYTES:
            yield [i]
            continue
        key = (tensor.dtype, tensor.device)
        bucket, held = open_buckets.pop(key, ([], 0))
        if held + nbytes > BUCKET_NBYTES:
            yield bucket
            bucket, held = [], 0
        bucket.append(i)
        open_buckets[key] = (bucket, held + nbytes)
    for bucket, _ in open_buckets.values():
        yield bucket
