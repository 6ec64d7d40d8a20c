"""The dry run: one step of every part of a run."""

import copy
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset
from tp_core.data import PreparedLoader
from tp_core.plugins import Session

from tp_trainer._checkpoint import Checkpoints
from tp_trainer._checks import check_callable, check_loader, check_model, check_optimizer
from tp_trainer._running._settings import Scheduler, SchedulerOptions, Validation
from tp_trainer._steps._step import Step
from tp_trainer._trainer import Trainer
from tp_trainer.tuning._batch_size import traceless


@dataclass(frozen=True, slots=True)
class DryRun:
    """The results of a dry run.

    Attributes:
        seconds: The seconds of each part: "train, validate and save", "resume and continue", "export".
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
    validation: Validation | Iterable[Any] | Mapping[str, Iterable[Any]] | None = None,
    scheduler: SchedulerOptions | Scheduler | None = None,
    state: dict[str, Any] | None = None,
    folder: str | Path | None = None,
    **arguments: Any,
) -> DryRun:
    """Run every part of ``fit`` once, on one batch each, and restore everything.

    It trains a step, validates, saves, resumes, trains another step and exports the weights. So a failure
    after the first epoch shows now. Afterwards the model, the optimizer, the scheduler, ``state`` and the
    random generators are unchanged, and its files are deleted. Callbacks and loggers do not take part.
    Call it on every rank.

    Args:
        trainer: The trainer.
        model: The plain model, or the prepared one.
        optimizer: Its optimizer.
        train_loader: As for ``fit``; its first samples are one batch.
        step: As for ``fit``.
        validation: As for ``fit``; one batch of each loader is used.
        scheduler: As for ``fit``.
        state: As for ``fit``.
        folder: A folder for its files that all ranks see. Give the folder of the run's checkpoints to test
            that disk and its free space. By default a temporary folder of this host.
        **arguments: Further arguments of ``fit``: ``clip_norm``, ``gradients`` and so on.

    Raises:
        Exception: Any error of a part, with a note that names the part.

    Collectives: as in ``fit`` and ``export``, then a broadcast and a barrier.
    """
    check_model("dry_run()", model)
    check_optimizer("dry_run()", optimizer)
    check_loader("train_loader", train_loader)
    check_callable("step", step)
    prepared, using = trainer.prepare(model, optimizer)
    session = trainer.session
    if validation is not None:
        if isinstance(validation, Validation):
            options = validation
        else:
            options = Validation(validation)
        source: Any = options.source
        if isinstance(source, Mapping):
            validation = replace(
                options, source={name: _one_batch(loader) for name, loader in source.items()}
            )
        else:
            check_loader("validation", source)
            validation = replace(options, source=_one_batch(source))
    stepped = scheduler.scheduler if isinstance(scheduler, SchedulerOptions) else scheduler
    seconds: dict[str, float] = {}
    with (
        _folder(session, folder) as place,
        traceless(trainer, session.unwrap(prepared), using),
        _restore_after([stepped, *(state or {}).values()], state),
    ):
        run: dict[str, Any] = {
            **arguments,
            "step": step,
            "validation": validation,
            "scheduler": scheduler,
            "state": state,
            "checkpoint": Checkpoints(place / "checkpoints", every_steps=1, keep=2),
        }
        with _part("train, validate and save", seconds):
            trainer.fit(model, optimizer, _one_batch(train_loader), epochs=1, **run)
        with _part("resume and continue", seconds):
            trainer.fit(model, optimizer, _one_batch(train_loader), epochs=2, resume="auto", **run)
        with _part("export", seconds):
            trainer.export(model, place / "model.safetensors")
        sizes = _nbytes(place / "checkpoints") // 2, _nbytes(place / "model.safetensors")
        agreed: tuple[int, int] = session.broadcast(sizes, where="sizes of a dry run")
    return DryRun(seconds, *agreed)


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
    """Make a folder for all ranks, and remove it at the end.

    Collectives: one broadcast before, one barrier after.
    """
    folder: Path | None = None
    failure: OSError | None = None
    if session.is_main:
        try:
            if parent is not None:
                Path(parent).mkdir(parents=True, exist_ok=True)
            folder = Path(tempfile.mkdtemp(prefix=".dry-run-", dir=parent))
        except OSError as error:
            failure = error
    reason = None if failure is None else str(failure)
    folder, reason = session.broadcast((folder, reason), where="the model of a dry run")
    if failure is not None or folder is None:
        raise failure or OSError(reason)
    try:
        yield folder
    finally:
        session.barrier()  # rank 0 must not delete the folder while another rank still uses it
        if session.is_main:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _restore_after(objects: Iterable[Any], values: dict[str, Any] | None) -> Iterator[None]:
    """Restore objects with a state, and the plain values of the dict."""
    states = [(o, copy.deepcopy(o.state_dict())) for o in objects if hasattr(o, "load_state_dict")]
    plain = {
        name: copy.deepcopy(value)
        for name, value in (values or {}).items()
        if not hasattr(value, "load_state_dict")
    }
    try:
        yield
    finally:
        for restored, before in states:
            restored.load_state_dict(before)
        if values is not None:
            values.update(plain)


def _one_batch(loader: Iterable[Any]) -> Iterable[Any]:
    """Return a loader of the first samples, as one batch; a prepared loader is returned unchanged."""
    if isinstance(loader, PreparedLoader):
        return loader
    if isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset):
        dataset: Dataset[Any] = loader.dataset
        size = int(loader.batch_size or getattr(loader.batch_sampler, "batch_size", None) or 1)
        length: int = len(dataset)  # type: ignore[arg-type]  # one without a length has an IterableDataset
        return DataLoader(
            Subset(dataset, range(min(size, length))), batch_size=size, collate_fn=loader.collate_fn
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
    if path.is_file():
        files = [path]
    else:
        files = [p for p in path.rglob("*") if p.is_file()]
    return sum(file.stat().st_size for file in files)
