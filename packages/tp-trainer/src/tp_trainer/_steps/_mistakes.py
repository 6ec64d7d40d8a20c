"""Errors of torch and Python that a mistake in a step or in its data leads to: a sentence on the cause."""

import re
from pathlib import Path
from traceback import walk_tb
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
        r"must have the same dtype.*Double|double.*(?:float|should be the same)|Float but found Double",
        "the batch or the model is in float64, as arrays of numpy are, and the other one is not; write "
        "inputs.float() in the dataset, or model.double()",
    ),
    _Mistake(
        r"must have the same dtype.*Half",
        "the model or the batch is in float16, and the other one is not; leave .half() out, and write "
        "Trainer(precision='fp16-mixed')",
    ),
    _Mistake(
        r"Cannot copy out of meta tensor",
        "the model is on the meta device, and has no values yet; write trainer.build(lambda: Model(config))",
    ),
    _Mistake(
        r"shapes cannot be multiplied",
        "a row has another size than the in_features of a Linear (with 4x8 and 3x1, rows have 8 numbers, and "
        "in_features=3); print the shape of the layer's input, and flatten or correct in_features",
    ),
    _Mistake(
        r"Target -?\d+ is out of bounds",
        "a target is no class of the model's output: classes count from 0, and the last layer has one output "
        "for each; correct the targets, or the last layer's out_features",
    ),
    _Mistake(
        r"index out of range in self",
        "an index is beyond the rows of an Embedding; compare tokens.max() with its num_embeddings",
    ),
    _Mistake(
        r"'indices' to have one of the following scalar types: Long",
        "an Embedding takes whole numbers, of dtype torch.int64; write tokens.long()",
    ),
    _Mistake(
        r"input should be between 0 and 1",
        "binary_cross_entropy takes probabilities; write binary_cross_entropy_with_logits(scores, targets)",
    ),
    _Mistake(
        r"result type Float can't be cast to the desired output type Long",
        "the targets of this loss are numbers like the model's output; write targets.float()",
    ),
    _Mistake(
        r"multi-target not supported",
        "cross_entropy takes one class for each row, of shape (rows,); write targets.squeeze(1), or "
        "targets.argmax(1) of one-hot rows",
    ),
    _Mistake(
        r"stack expects each tensor to be equal size",
        "the samples of a batch have different shapes; pad them in a collate_fn, as by "
        "torch.nn.utils.rnn.pad_sequence, or cut them to one size in the dataset",
    ),
    _Mistake(
        r"Expected more than 1 value per channel",
        "a batch norm needs more than one row; give the DataLoader drop_last=True, or a larger batch_size",
    ),
    _Mistake(
        r"must be Tensor, not (?:list|tuple|dict)",
        "a batch is what the dataset's samples are, joined; take it apart first: inputs, targets = batch",
    ),
    _Mistake(
        r"has no len\(\)",
        "a dataset has __len__ and __getitem__; write __len__, or make it a torch.utils.data.IterableDataset",
    ),
    _Mistake(
        r"backward through the graph a second time",
        "a second backward() goes through a graph that the first one has freed; add the losses, or give the "
        "first trainer.backward(loss, retain_graph=True); detach what is kept from step to step",
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
    if _is_of_a_sample(error):
        _add(
            error,
            "the dataset's __getitem__ raised it for an index below its __len__; return the number of its "
            "samples there, or look at what __getitem__ looks up",
        )


def _is_of_a_sample(error: BaseException) -> bool:
    """Return whether a dataset did not find the sample of an index, here or in a worker of the loader."""
    if not isinstance(error, IndexError | KeyError):
        return False
    if _FETCH in str(error):  # which has the worker's traceback
        return isinstance(error, IndexError)
    if isinstance(error, KeyError) and not isinstance(error.args[0], int):
        return False  # the name of a column, not the number of a sample
    files = (frame.f_code.co_filename for frame, _ in walk_tb(error.__traceback__))
    return any(Path(file).as_posix().endswith(_FETCH) for file in files)


_FETCH = "torch/utils/data/_utils/fetch.py"


def _add(error: BaseException, note: str) -> None:
    if note not in getattr(error, "__notes__", ()):
        error.add_note(note)
