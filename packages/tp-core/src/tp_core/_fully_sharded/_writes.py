"""Weights that a forward pass writes: fully sharded, what is written would be gone with the gathered copy."""

from typing import Any

import torch
from torch import Tensor, nn

from tp_core._tensors._sharding import is_dtensor
from tp_core.errors import StepError

__all__ = ["WriteWatch"]

_WENT_BACK = (
    "the step made a backward pass of its own (torch.autograd.grad, for a gradient penalty, say), after "
    "which fully sharded parameters are shards again; take the backend 'ddp', whose ranks have whole ones"
)


class WriteWatch:
    """Makes sure that the parameters of one unit are as they were when its forward pass ends.

    Seen are writes that version counters count, data that is replaced, and in the first forward pass those
    into ``.data``, too.

    Args:
        module: The unit, which is about to be sharded: what no unit within it has.
    """

    def __init__(self, module: nn.Module) -> None:
        self._places = [
            (f"{prefix}.{name}".lstrip("."), inner._parameters, name)
            for prefix, inner in module.named_modules()
            for name, parameter in inner._parameters.items()
            if parameter is not None and not is_dtensor(parameter)
        ]
        self._class = type(module).__name__
        self._before: list[tuple[int, int]] | None = None
        self._sums: list[Tensor] | None = None
        self._is_first = True

    def hook(self, module: nn.Module) -> None:
        """Watch each call of the unit: before it is sharded, so that torch drops the weights after it."""
        module.register_forward_hook(self.after)

    def hook_begin(self, module: nn.Module) -> None:
        """The other end: after it is sharded, so that torch has gathered the weights before it."""
        module.register_forward_pre_hook(self.begin)

    def begin(self, *_: Any) -> None:
        """Note what the parameters are, now that they are whole."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
            self._before = None
            return
        self._before = self._now()
        if self._is_first:
            self._sums = self._sums_now()

    def after(self, *_: Any) -> None:
        """Make sure that they still are.

        Raises:
            StepError: One was written.
        """
        before, self._before = self._before, None
        if before is None or torch.compiler.is_compiling():
            return
        now = self._now()
        if len(now) != len(before):  # torch dropped what was gathered, as after a backward pass
            raise StepError(_WENT_BACK)
        changed = [a != b for a, b in zip(before, now, strict=True)]
        if self._is_first and self._sums is not None:
            sums = zip(self._sums, self._sums_now(), strict=True)
            changed = [c or not a.equal(b) for c, (a, b) in zip(changed, sums, strict=True)]
            self._is_first, self._sums = False, None
        if not any(changed):
            return
        names = [name for name, row, key in self._places if _is_whole(row[key])]
        msg = (
            f"the forward pass wrote the parameter {names[changed.index(True)]!r} of the model's "
            f"{self._class}, which each rank has gathered for this pass "
            "alone: fully sharded, what is written is lost. Change weights between two steps, on what "
            "model.parameters() gives then, compute the changed weight anew in each forward pass "
            "(torch.nn.utils.parametrize), or take the backend 'ddp', also for a step that asks "
            "torch.autograd.grad for gradients"
        )
        raise StepError(msg)

    def _tensors(self) -> list[Tensor]:
        return [row[key] for _, row, key in self._places if _is_whole(row[key])]

    def _now(self) -> list[tuple[int, int]]:
        return [(t._version, t.data_ptr()) for t in self._tensors()]

    @torch.no_grad()
    def _sums_now(self) -> list[Tensor]:
        return [t.sum().nan_to_num() for t in self._tensors()]


def _is_whole(tensor: Tensor | None) -> bool:
    return tensor is not None and not is_dtensor(tensor)
