"""Errors of torch and Python that a mistake in a step or in its data leads to: a sentence on the cause."""

import re
from typing import Any, NamedTuple


class _Mistake(NamedTuple):
    words: str  # of the error, a pattern
    note: str  # the cause, and what to write


_MISTAKES = (
    _Mistake(
        r"must be Tensor, not (?:numpy\.)?ndarray",
        "the batch has numpy arrays, as the loader's collate_fn returned them; return tensors there: "
        "torch.from_numpy(array)",
    ),
    _Mistake(
        r"default_collate: .* found <class 'NoneType'>",
        "a sample of the dataset is None, or holds it; return a value in its place, or leave such samples "
        "out in a collate_fn of your own",
    ),
    _Mistake(
        r"target dtype to be Long|expected scalar type Long but found|nll_loss.* not implemented for",
        "the targets of a loss over classes are their numbers, of dtype torch.int64; write targets.long(), "
        "or take a loss for numbers, such as mse_loss",
    ),
    _Mistake(
        r"not compiled with CUDA enabled|No CUDA GPUs are available|Found no NVIDIA driver",
        "here is no GPU, and a batch comes to the step on the model's device; leave .cuda() out, and make "
        "tensors of your own with device=trainer.device",
    ),
)


def explain_mistake(error: BaseException, *batch: Any) -> None:
    """Add a note to an error whose cause is known, in a step or in the loader of its batches.

    Args:
        error: The error.
        *batch: The batch that the step was given, if it is known.
    """
    if batch == (None,):
        _add(error, "the loader yielded None for a batch; look at what its collate_fn returns")
        return
    text = str(error)
    for mistake in _MISTAKES:
        if re.search(mistake.words, text):
            _add(error, mistake.note)
            return


def _add(error: BaseException, note: str) -> None:
    if note not in getattr(error, "__notes__", ()):
        error.add_note(note)
