"""Copy many tensors to another device in few transfers."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

__all__ = ["copy_coalesced", "move_coalesced"]

BUCKET_NBYTES = 32 * 2**20
"""A bucket is one transfer. Larger ones win nothing and need as much memory on both sides."""


def move_coalesced(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Return the tensors on ``device``: differentiable, and themselves where they are there.

    Small ones of one type travel together, in one flat tensor.
    """
    moved = list(tensors)
    # A copy to the CPU that is not waited for would be read before it is there.
    non_blocking = device.type != "cpu"
    for bucket in _buckets(tensors, device):
        if len(bucket) == 1:
            moved[bucket[0]] = tensors[bucket[0]].to(device, non_blocking=non_blocking)
            continue
        flat = torch.cat([tensors[i].reshape(-1) for i in bucket])
        flat = flat.to(device, non_blocking=non_blocking)
        sizes = [tensors[i].numel() for i in bucket]
        for i, piece in zip(bucket, torch.split(flat, sizes), strict=True):
            moved[i] = piece.view(tensors[i].shape)
    return moved


@torch.no_grad()
def copy_coalesced(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source into its target in place; the targets are all on one device."""
    if not targets:
        return
    arrived = move_coalesced([s.detach() for s in sources], targets[0].device)
    # One kernel for all of them.
    torch._foreach_copy_(list(targets), arrived)


def _buckets(tensors: Sequence[Tensor], device: torch.device) -> Iterator[list[int]]:
    """Yield the positions of tensors that travel together, of those that have to travel."""
    open_buckets: dict[tuple[torch.dtype, torch.device], tuple[list[int], int]] = {}
    for i, tensor in enumerate(tensors):
        if tensor.device == device:
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
