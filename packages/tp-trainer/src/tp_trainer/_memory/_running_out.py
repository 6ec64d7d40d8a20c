"""What is said when memory has run out."""

from collections.abc import Callable

import torch
from tp_core.plugins import Selection

__all__ = ["explain_out_of_memory", "is_out_of_memory"]

_HEAD = "Memory has run out: "


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error, or one that it came from, says that memory has run out."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator" in str(error):
            return True
        error = error.__cause__
    return False


def explain_out_of_memory(error: BaseException, selection: Callable[[], Selection]) -> None:
    """Let an error of memory that has run out say what was needed and what helps; others stay as they are.

    Args:
        error: What was raised where something was trained.
        selection: Returns how the backend was chosen, with what each of them would need.
    """
    is_explained = any(note.startswith(_HEAD) for note in getattr(error, "__notes__", ()))
    if not is_explained and is_out_of_memory(error):
        error.add_note(_advice(selection()))


def _advice(selection: Selection) -> str:
    need = selection.chosen.verdict.memory
    remedy = (
        "less is needed with a smaller batch and accumulate=, precision='bf16-mixed', or more devices"
        if need is None
        else need.remedy
    )
    more = "" if need else "\ntrainer.estimate(model, optimizer, batch, step) tells what each backend needs"
    return f"{_HEAD}{remedy}.\n{selection}{more}"
