"""Predictions for the samples of a loader, in their order, each once, on any number of devices."""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from tp_core import tree_map
from tp_core.errors import ConfigError, LoaderError, StepError
from tp_core.internal import SampleRows, join_rows, row_count, write_atomically
from tp_core.plugins import PreparedLoader, Session

from tp_trainer._checkpoint._model_files import write_on_main
from tp_trainer._metrics._evaluation import evaluating
from tp_trainer._metrics._rounds import Rounds, on_cpu
from tp_trainer._opening._boundaries import StepBoundaries
from tp_trainer._steps._ended import telling_of_ended_iterators
from tp_trainer._steps._precision import RunStep, Step

__all__ = ["Predictions"]

_FORMATS = (".jsonl", ".safetensors")


class Predictions:
    """What a step returns for the samples of a loader: in the loader's order, each sample once.

    Iterate it on every rank, and to its end: each rank gets all predictions, in pieces of some rows, on the
    CPU. Where the pieces begin and end depends on the backend; joined they are the same everywhere. Each
    iteration predicts anew. The model is in evaluation mode meanwhile.

    Args:
        session: Where the step runs.
        run: Runs the step.
        step: The user's step.
        model: The prepared model.
        batches: The prepared loader.
        boundaries: Asked when an iteration begins for what `Rounds` takes, or for ``None`` where signals do
            not cut it short.
    """

    def __init__(
        self,
        session: Session,
        run: RunStep,
        step: Step,
        model: nn.Module,
        batches: PreparedLoader,
        *,
        boundaries: Callable[[], StepBoundaries | None] = lambda: None,
    ) -> None:
        self._session = session
        self._run = run
        self._step = partial(_predicting, step)
        self._model = model
        self._batches = batches
        self._boundaries = boundaries

    def __iter__(self) -> Iterator[Any]:
        """Predict, and yield pieces in the order of the samples.

        Raises:
            StepError: The step returned something without a row for each sample.

        Collectives: the buffers' broadcasts before, then an all-gather of objects for some batches each.
        """
        rounds, batches = Rounds(self._session, boundaries=self._boundaries()), self._batches
        epoch = batches.next_epoch
        try:
            with telling_of_ended_iterators(), evaluating(self._session, self._model), batches.whole():
                for batch in batches:
                    pieces = self._predicted(batch)
                    yield from rounds.reach(batches.number)
                    for piece in pieces:
                        yield from rounds.add(batches.number, piece)
                yield from rounds.finish()
        finally:
            batches.set_epoch(epoch)

    def _predicted(self, batch: Any) -> tuple[Any, ...]:
        with torch.no_grad():  # not while the caller has what was yielded
            output = cast("Mapping[str, SampleRows]", self._run(self._step, self._model, batch))
        share = self._session.share
        if share is not None and share.samples == 0:  # a stand-in
            return ()
        pieces = output["rows"].pieces
        for piece in pieces:
            if len(pieces) > 1 or row_count(piece) is None:
                msg = (
                    "a prediction must have one row for each sample of its batch: tensors, arrays or lists, "
                    f"alone or in dicts and tuples; got {_describe(piece)}"
                )
                raise StepError(msg)
        return tuple(tree_map(on_cpu, piece) for piece in pieces)

    def collect(self) -> Any:
        """Return the predictions of all samples, joined by their rows, on every rank.

        Raises:
            StepError: As in iterating; or the pieces do not go together.
            LoaderError: The loader has no sample.
        """
        pieces = list(self)
        if not pieces:
            msg = "there is nothing to predict: the loader yielded no sample"
            raise LoaderError(msg)
        return join_rows(pieces)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the predictions to a file; call it on every rank, and rank 0 writes.

        A name that ends in ".jsonl" gets a line of JSON for each sample, written as they come. One that
        ends in ".safetensors" gets tensors by name, all at once; a lone tensor is named "predictions".
        A crash meanwhile leaves the old file as it was.

        Raises:
            ConfigError: The name ends in something else.
            StepError: As in iterating; or a safetensors file is to hold something besides tensors.
            LoaderError: A safetensors file is to be written, and the loader has no sample.
            OSError: The file cannot be written; on every rank.
        """
        place = Path(path)
        if place.suffix not in _FORMATS:
            msg = (
                f"predictions are written to files that end in {' or '.join(_FORMATS)}, not to {place.name!r}"
            )
            raise ConfigError(msg)
        if place.suffix == ".safetensors":
            tensors = _by_name(self.collect())
            write_on_main(
                self._session, place, lambda: write_atomically(partial(_write_tensors, tensors), place)
            )
            return
        pieces = iter(self)
        if not self._session.is_main:
            _exhaust(pieces)
        write_on_main(self._session, place, lambda: _write_lines(pieces, place))


def _predicting(step: Step, model: nn.Module, batch: Any) -> dict[str, SampleRows]:
    return {"rows": SampleRows((step(model, batch),))}


def _write_lines(pieces: Iterator[Any], place: Path) -> None:
    def write(part: Path) -> None:
        with part.open("w", encoding="utf-8") as file:
            for piece in pieces:
                for row in range(row_count(piece) or 0):
                    file.write(json.dumps(_row(piece, row), ensure_ascii=False) + "\n")

    try:
        write_atomically(write, place)
    finally:
        _exhaust(pieces)  # the other ranks need this one


def _exhaust(pieces: Iterator[Any]) -> None:
    for _ in pieces:
        pass


def _row(value: Any, number: int) -> Any:
    """Return a row as JSON has it."""
    if isinstance(value, Mapping):
        return {str(key): _row(entry, number) for key, entry in value.items()}
    if isinstance(value, tuple):
        return [_row(entry, number) for entry in value]
    if value is None:
        return None
    row = value[number]
    return row.tolist() if hasattr(row, "tolist") else row


def _by_name(value: Any) -> dict[str, Tensor]:
    tensors = value if isinstance(value, Mapping) else {"predictions": value}
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            msg = (
                f"a safetensors file holds tensors alone, and the predictions have {type(tensor).__name__} "
                f"as {name!r}; write them to a file that ends in .jsonl"
            )
            raise StepError(msg)
    return {str(name): tensor.contiguous() for name, tensor in tensors.items()}


def _write_tensors(tensors: Mapping[str, Tensor], part: Path) -> None:
    from safetensors.torch import save_file

    save_file(dict(tensors), part)


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"{type(value).__name__}: {value!r:.200}"
