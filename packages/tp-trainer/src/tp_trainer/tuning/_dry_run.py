"""One step of everything that a run does, before hours are spent on it."""

import copy
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset
from tp_core.plugins import PreparedLoader, Session

from tp_trainer._checkpoint import Checkpoints
from tp_trainer._checks import check_callable, check_loader, check_model, check_optimizer
from tp_trainer._steps._step import Step
from tp_trainer._trainer import Trainer
from tp_trainer.tuning._batch_size import traceless


@dataclass(frozen=True, slots=True)
class DryRun:
    """What a dry run has found out.

    Attributes:
        seconds: How many seconds each part took, by name: "train, validate and save", "resume and go on",
            "export".
        checkpoint_nbytes: The size of a checkpoint, in bytes.
        exported_nbytes: The size of the exported weights, in bytes.
    """

    seconds: Mapping[str, float]
    checkpoint_nbytes: int
    exported_nbytes: int


def dry_run(
    trainer: Trainer,
    model: nn.Module,
    optimizer: Optimizer,
    train_loader: Iterable[Any],
    *,
    step: Step,
    val_loader: Iterable[Any] | Mapping[str, Iterable[Any]] | None = None,
    scheduler: Any = None,
    state: dict[str, Any] | None = None,
    folder: str | Path | None = None,
    **arguments: Any,
) -> DryRun:
    """Do once what a run of ``fit`` does, on a batch each, and put everything back.

    It trains a step, validates, saves, resumes, trains another step and exports the weights: what would
    fail after the first epoch fails now. The model, the optimizer, the scheduler, ``state`` and the random
    generators are then as they were, and its files are gone. Callbacks and loggers do not take part. Call
    it on every rank.

    Args:
        trainer: What will train.
        model: The plain model, or the prepared one.
        optimizer: Its optimizer.
        train_loader: As for ``fit``; its first samples are one batch.
        step: As for ``fit``.
        val_loader: As for ``fit``; of each loader one batch.
        scheduler: As for ``fit``.
        state: As for ``fit``.
        folder: Where its files are meanwhile, seen by all ranks: give that of the run's checkpoints, to try
            the disk and its space. A temporary folder of this host by default.
        **arguments: Further ones of ``fit``: ``metrics``, ``val_step``, ``clip_norm`` and so on.

    Raises:
        Exception: Whatever fails, with a note of the part in which it did.
    """
    check_model("dry_run()", model)
    check_optimizer("dry_run()", optimizer)
    check_loader("train_loader", train_loader)
    check_callable("step", step)
    prepared, using = trainer.prepare(model, optimizer)
    session = trainer.session
    loaders = val_loader if isinstance(val_loader, Mapping) else {"": val_loader}
    few = {name: None if loader is None else _one_batch(loader) for name, loader in loaders.items()}
    seconds: dict[str, float] = {}
    with (
        _folder(session, folder) as place,
        traceless(trainer, session.unwrap(prepared), using),
        _kept([scheduler, *(state or {}).values()], state),
    ):
        run: dict[str, Any] = {
            **arguments,
            "step": step,
            "val_loader": few if isinstance(val_loader, Mapping) else few[""],
            "scheduler": scheduler,
            "state": state,
            "checkpoint": Checkpoints(place / "checkpoints", every_steps=1, keep=2),
        }
        with _part("train, validate and save", seconds):
            trainer.fit(model, optimizer, _one_batch(train_loader), epochs=1, **run)
        with _part("resume and go on", seconds):
            trainer.fit(model, optimizer, _one_batch(train_loader), epochs=2, resume="auto", **run)
        with _part("export", seconds):
            trainer.export(model, place / "model.safetensors")
        sizes = _nbytes(place / "checkpoints") // 2, _nbytes(place / "model.safetensors")
        found: tuple[int, int] = session.broadcast(sizes)
    return DryRun(seconds, *found)


@contextmanager
def _part(name: str, seconds: dict[str, float]) -> Iterator[None]:
    began = time.perf_counter()
    try:
        yield
    except BaseException as error:
        error.add_note(f"in the dry run, in its part: {name}")
        raise
    seconds[name] = time.perf_counter() - began


@contextmanager
def _folder(session: Session, parent: str | Path | None) -> Iterator[Path]:
    """Make a folder that all ranks use, and remove it."""
    made: Path | None = None
    failure: OSError | None = None
    if session.is_main:
        try:
            if parent is not None:
                Path(parent).mkdir(parents=True, exist_ok=True)
            made = Path(tempfile.mkdtemp(prefix=".dry-run-", dir=parent))
        except OSError as error:
            failure = error
    made, told = session.broadcast((made, None if failure is None else str(failure)))
    if failure is not None or made is None:
        raise failure or OSError(told)
    try:
        yield made
    finally:
        session.barrier()
        if session.is_main:
            shutil.rmtree(made, ignore_errors=True)


@contextmanager
def _kept(objects: Iterable[Any], values: dict[str, Any] | None) -> Iterator[None]:
    """Put back what has a state, and plain values in the dict."""
    states = [(o, copy.deepcopy(o.state_dict())) for o in objects if hasattr(o, "load_state_dict")]
    plain = {
        name: copy.deepcopy(value)
        for name, value in (values or {}).items()
        if not hasattr(value, "load_state_dict")
    }
    try:
        yield
    finally:
        for one, kept in states:
            one.load_state_dict(kept)
        if values is not None:
            values.update(plain)


def _one_batch(loader: Iterable[Any]) -> Iterable[Any]:
    """Return a loader of the first samples, as one batch; a prepared one is taken as it is."""
    if isinstance(loader, PreparedLoader):
        return loader
    if isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset):
        dataset: Dataset[Any] = loader.dataset
        size = int(loader.batch_size or getattr(loader.batch_sampler, "batch_size", None) or 1)
        known: int = len(dataset)  # type: ignore[arg-type]  # one without a length has an IterableDataset
        return DataLoader(
            Subset(dataset, range(min(size, known))), batch_size=size, collate_fn=loader.collate_fn
        )
    return _First(loader)


class _First:
    """The first batch of a loader."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self._loader = loader

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self._loader), 1)


def _nbytes(path: Path) -> int:
    files = [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]
    return sum(file.stat().st_size for file in files)
