"""Loss scaling under which all ranks take a step, or none."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from tp_shard._groups._group import GroupLike, as_group

__all__ = ["GradScaler"]


class GradScaler(torch.amp.GradScaler):
    """A ``torch.amp.GradScaler`` whose ranks agree whether gradients overflowed.

    A gradient overflows on the rank that holds the shard; with torch's own that rank alone would
    leave the step out, and the copies of what all ranks have would diverge.

    Args:
        device: The type of the devices that compute, such as "cuda" or "cpu".
        group: The ranks; the current model-parallel group by default.
        **kwargs: What else torch's takes, such as ``init_scale``.

    Collectives: an all-reduce of one number in each step.
    """

    def __init__(self, device: str = "cuda", *, group: GroupLike = None, **kwargs: Any) -> None:
        super().__init__(device, **kwargs)
        self._group = as_group(group)

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        found: dict[torch.device, Tensor] = super()._unscale_grads_(
            optimizer, inv_scale, found_inf, allow_fp16
        )
        if self._group.size == 1:
            return found
        # One message, whatever devices this rank's gradients are on.
        worst = found_inf.clone()
        for flag in found.values():
            worst = torch.maximum(worst, flag.to(worst.device))
        dist.all_reduce(worst, dist.ReduceOp.MAX, group=self._group.handle)
        return {device: worst.to(device) for device in found or {worst.device: worst}}
