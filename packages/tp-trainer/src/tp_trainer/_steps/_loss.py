"""The loss in what a step returned."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from tp_core.errors import StepError

__all__ = ["loss_of"]


def loss_of(output: Any, *, training: bool) -> Tensor:
    """Return the loss in what a step returned.

    Raises:
        StepError: The output has no loss, or it is not a scalar tensor that leads to parameters.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if not isinstance(loss, Tensor):
        got = f"a dict with {sorted(map(str, output))}" if isinstance(output, Mapping) else repr(output)
        msg = (
            f"the step must return its loss, a scalar tensor, or a dict with it as 'loss'; it returned {got}"
        )
        raise StepError(msg)
    if loss.dim() != 0 and loss.numel() != 1:
        msg = (
            f"the step's loss must be a scalar, got shape {tuple(loss.shape)}; return its mean over the "
            "samples (loss.mean()), and where a method of the model makes it on parts of the batch, as with "
            "dp-gather, make it in the step instead, from the model's output"
        )
        raise StepError(msg)
    if training and not loss.requires_grad:
        msg = (
            "the step's loss leads to no parameter (it does not require grad); compute it from "
            "the model's output, without .item(), .detach() or torch.no_grad()"
        )
        raise StepError(msg)
    return loss
