"""What is said when memory has run out."""

from collections.abc import Callable
from typing import TypeVar

import torch
from tp_core.plugins import Selection

__all__ = ["is_out_of_memory", "telling_why"]

T = TypeVar("T")


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error, or one that it came from, says that memory has run out."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator" in str(error):
            return True
        error = error.__cause__
    return False


def telling_why(selection: Callable[[], Selection], call: Callable[[], T]) -> T:
    """Return what a call returns; where memory runs out in it, the error says what was needed and what helps.

    Args:
        selection: Returns how the backend was chosen, with what each of them would need.
        call: What trains.
    """
    try:
        return call()
    except (RuntimeError, MemoryError) as error:
        if is_out_of_memory(error):
            error.add_note(_advice(selection()))
        raise


def _advice(selection: Selection) -> str:
    need = selection.chosen.verdict.memory
    remedy = (
        "less is needed with a smaller batch and accumulate=, precision='bf16-mixed', or more devices"
        if need is None
        else need.remedy
    )
    more = "" if need else "\ntrainer.estimate(model, optimizer, batch, step) tells what each backend needs"
    return f"Memory has run out: {remedy}.\n{selection}{more}"
