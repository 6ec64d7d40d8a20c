"""Notes on out-of-memory errors."""

from collections.abc import Callable

import torch
from tp_core.discovery import Selection

_HEAD = "Memory has run out: "


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether an error, or one of its causes, is out of memory."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator" in str(error):
            return True
        error = error.__cause__
    return False


def explain_out_of_memory(error: BaseException, selection: Callable[[], Selection]) -> None:
    """Add a note to an out-of-memory error: the memory of each backend, and remedies. Ignore other errors.

    Args:
        error: An error of training.
        selection: Returns the selection of the backend, with the memory of each.
    """
    is_explained = any(note.startswith(_HEAD) for note in getattr(error, "__notes__", ()))
    if not is_explained and is_out_of_memory(error):
        error.add_note(_advice(selection()))


def _advice(selection: Selection) -> str:
    need = selection.chosen.verdict.memory
    if need is not None:
        return f"{_HEAD}{need.remedy}.\n{selection}"
    advice = "less is needed with a smaller batch and accumulate=, precision='bf16-mixed', or more devices"
    shown = "trainer.estimate(model, optimizer, batch, step) shows what each backend needs"
    return f"{_HEAD}{advice}.\n{selection}\n{shown}"
