"""The memory that a job needs under each installed backend, as a table; the devices need not exist."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from tp_core import LaunchEnvironment, resolve_devices, tree_leaves, tree_map
from tp_core.discovery import Contribution, Selection
from tp_core.internal import capture_rng_state, free_nbytes, restore_rng_state
from tp_core.jobs import Footprint, Precision, Recomputation
from tp_core.plugins import Backend, Job, Verdict, registry

from tp_trainer._activations import recomputations
from tp_trainer._checks import check_known, check_model, check_positive
from tp_trainer._memory._footprint import measure_footprint, parse_nbytes
from tp_trainer._opening._agreement import agree_at_start
from tp_trainer._steps._step import Step

log = logging.getLogger("tp_trainer")


@dataclass(frozen=True, slots=True)
class MemoryTable:
    """The memory of a job per device, under each installed backend; ``str()`` returns a table.

    Attributes:
        verdicts: The backends' verdicts by their names, the best first; ``verdict.memory`` has the numbers.
        footprint: The memory of a device with the whole model.
        devices: The number of devices.
        free_nbytes: The free bytes of each device; ``None`` if unknown.
        recomputation: What the backward pass computes again, where the trainer chooses it.
    """

    verdicts: Mapping[str, Verdict]
    footprint: Footprint
    devices: int
    free_nbytes: int | None
    recomputation: Recomputation | None = None

    @property
    def best(self) -> str | None:
        """The backend that "auto" would choose; ``None`` if none fits."""
        return next((name for name, verdict in self.verdicts.items() if verdict.is_fit), None)

    def __str__(self) -> str:
        head = f"training on {self.devices} device{'s' * (self.devices != 1)}, each of them"
        if self.recomputation not in (None, "nothing"):
            head += f", computing {self.recomputation} again in backward"
        width = max(map(len, self.verdicts), default=0)
        lines = [head]
        for name, verdict in self.verdicts.items():
            mark = "*" if name == self.best else "-"
            said = verdict.reason if verdict.memory is None else str(verdict.memory)
            more = f"; {verdict.remedy}" if not verdict.is_fit and verdict.remedy else ""
            lines.append(f"  {mark}  {name:{width}}  {'fits ' if verdict.is_fit else 'unfit'}  {said}{more}")
        if self.footprint.unknown:
            lines.append(f"not known: {self.footprint.unknown}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return the table as values for JSON."""
        return {
            "devices": self.devices,
            "free_bytes": self.free_nbytes,
            "recomputation": self.recomputation,
            "best": self.best,
            "unknown": self.footprint.unknown,
            "backends": {
                name: {
                    "fits": verdict.is_fit,
                    "reason": verdict.reason,
                    "remedy": verdict.remedy,
                    "memory": None if verdict.memory is None else verdict.memory.to_dict(),
                }
                for name, verdict in self.verdicts.items()
            },
        }


def table_of(
    job: Job, backends: Iterable[Contribution[Backend[Any]]], *, devices: int, kind: str
) -> MemoryTable:
    """Return the table of a job with a footprint.

    Args:
        job: The job, with its model, its footprint and the free bytes of each device.
        backends: The installed backends.
        devices: The number of devices, each with a process, or all in one process.
        kind: The type of the devices.
    """
    names = tuple(torch.device(kind) if kind == "cpu" else torch.device(kind, i) for i in range(devices))
    processes = LaunchEnvironment(world_size=devices, local_world_size=devices)
    ways = [
        replace(job, environment=processes, devices=names[:1]),
        replace(job, environment=LaunchEnvironment(), devices=names),
    ]
    verdicts = {c.item.name: _best([_assess(c.item, way) for way in ways]) for c in backends}
    ordered = sorted(
        ((name, verdict) for name, (verdict, _) in verdicts.items()),
        key=lambda item: (-_rank(item[1]) - verdicts[item[0]][1], item[0]),
    )
    footprint = job.footprint or Footprint(weights=0, gradients=0)
    return MemoryTable(dict(ordered), footprint, devices, job.free_nbytes, job.recomputation)


def resized(batch: Any, samples: int) -> Any:
    """Return a batch with another number of samples: its first ones, repeated if needed."""
    rows = row_count_of(batch)
    if rows is None:
        return batch

    def resize(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.dim() or leaf.shape[0] != rows:
            return leaf
        return leaf[torch.arange(samples, device=leaf.device) % rows]

    return tree_map(resize, batch)


def row_count_of(batch: Any) -> int | None:
    """Return the number of samples in a batch: the rows of its first tensor; ``None`` without a tensor."""
    return next(
        (leaf.shape[0] for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.dim()), None
    )


def _assess(backend: Backend[Any], job: Job) -> Verdict:
    try:
        verdict = backend.assess(job)
        need = backend.estimate_memory(job) if verdict.is_fit else None
    except Exception as error:  # noqa: BLE001 - a plugin may raise anything
        return Verdict.unfit(f"its assessment raised {type(error).__name__}: {error}")
    return verdict if need is None else verdict.with_memory(need)


def _best(verdicts: list[Verdict]) -> tuple[Verdict, float]:
    """Return the better verdict of the two ways, and a bonus: a process per device is faster."""
    by_process, in_one = verdicts
    if _rank(by_process) >= _rank(in_one):
        return by_process, 1000.0 if by_process.is_fit else 0.0
    return in_one, 0.0


def _rank(verdict: Verdict) -> float:
    if verdict.score is not None:
        return verdict.score
    return -1.0 if verdict.lacks_memory else -2.0


# -- The memory of a job, before the choice of a backend ------------------------------------------


LEAST_PART = 0.05
"""The part of the free memory for weights, gradients and optimizer state, below which nothing is measured."""

RESERVED = {"cpu": 128 * 2**20}
RESERVED_ELSEWHERE = 512 * 2**20
"""The bytes of a device that are not for tensors: libraries load code and take workspaces at first use."""


@dataclass(frozen=True, slots=True)
class Work:
    """The known parts of a job's steps.

    Attributes:
        optimizer: The optimizer, if known.
        loader: The loader of the whole job's batches, if known.
        step: The step, if known.
    """

    optimizer: Optimizer | None = None
    loader: Any = None
    step: Callable[[Any, Any], Any] | None = None


def add_memory(job: Job, work: Work) -> Iterator[Job]:
    """Yield the job with its footprint and the free memory, then with more and more recomputation.

    Without the latter, a job that needs little of the free memory is unchanged. Rank 0 measures for all
    ranks: they must choose the same backend.

    Raises:
        DisagreementError: The ranks' models differ in size.
        RankFailedError: Ranks did not arrive in time.

    Collectives: none; for a large model an exchange through the launcher's store, each time.
    """
    if job.recomputation is None or job.model is None:
        yield _with_memory(job, work)
        return
    for what in recomputations(job.model):
        found = _with_memory(replace(job, recomputation=what), work)
        if found.footprint is None or found.footprint.activations is None:
            if job.environment.is_main:
                why = "the free memory is not known" if found.footprint is None else found.footprint.unknown
                log.warning(
                    "activation_checkpointing='auto' has nothing to go by, and changes nothing: %s; "
                    "checkpoint_activations(model) does not need to know",
                    why,
                )
            yield replace(found, recomputation=None)
            return
        yield found


def _with_memory(job: Job, work: Work) -> Job:
    traits, model = job.traits, job.model
    if traits is None or model is None:
        return job

    def decide(everyones: list[int | None]) -> dict[str, Any]:
        known = [free for free in everyones if free is not None]
        free = min(known, default=None)
        is_small = job.recomputation is None and 4 * traits.nbytes < LEAST_PART * (free or 0)
        if free is None or is_small:
            return {"footprint": None, "free": None}
        return {"footprint": _measure(model, job, work).to_dict(), "free": free}

    found = agree_at_start(
        job.environment,
        {"bytes of the model": traits.nbytes},
        message=_free(job, model, work.optimizer),
        decide=decide,
    )
    if found["footprint"] is None:
        return job
    return replace(job, footprint=Footprint(**found["footprint"]), free_nbytes=found["free"])


def estimate_job(
    job: Job,
    work: Work,
    model: nn.Module,
    batch: Any,
    backends: Iterable[Contribution[Backend[Any]]],
    *,
    devices: int | None,
    memory: int | str | None,
) -> MemoryTable:
    """Return the table of a job; see :meth:`tp_trainer.Trainer.estimate`."""
    count = devices or job.environment.world_size * len(job.devices)
    job = replace(job, model=model)
    free = parse_nbytes(memory) if isinstance(memory, str) else memory
    if free is None:
        free = _free(job, model, work.optimizer)
    rows = row_count_of(batch)
    share = batch if rows is None else resized(batch, -(-rows // count))
    backends = list(backends)
    for what in [None] if job.recomputation is None else recomputations(model):
        job = replace(job, recomputation=what)
        footprint = measure_footprint(
            model,
            work.optimizer,
            share,
            work.step,
            precision=job.precision,
            device=job.devices[0],
            recomputation=what,
        )
        footprint = replace(footprint, part=_part(rows, count))
        job = replace(job, footprint=footprint, free_nbytes=free)
        table = table_of(job, backends, devices=count, kind=job.devices[0].type)
        if table.best is not None or footprint.activations is None:
            break
    return table


def estimate(
    model: nn.Module,
    optimizer: Optimizer | None = None,
    batch: Any = None,
    step: Step | None = None,
    *,
    devices: int = 1,
    memory: int | str | None = None,
    samples: int | None = None,
    precision: Precision = "fp32",
    accumulate: int = 1,
) -> MemoryTable:
    """Return the memory that training needs on each of some CUDA devices, which need not exist here.

    For what a trainer of this program needs on its own devices there is :meth:`tp_trainer.Trainer.estimate`.

    Args:
        model: The plain model; it may be on the meta device.
        optimizer: Its optimizer. Without it, two values per parameter are assumed, as for Adam.
        batch: A batch of one device. Without it the activations are unknown.
        step: As for :meth:`tp_trainer.Trainer.fit`.
        devices: The number of devices.
        memory: The free memory of each: bytes, or text such as "80GiB"; by default it is unknown.
        samples: The samples of the batch: its first ones, repeated if needed; by default all.
        precision: As of the trainer.
        accumulate: The batches of one optimizer step.

    Raises:
        ConfigError: An argument has a wrong value.

    Example:
        >>> print(estimate(torch.nn.Linear(4, 4), devices=8, memory="80GiB"))  # doctest: +SKIP
    """
    check_model("estimate()", model)
    check_known("estimate()", model, optimizer, step)
    check_positive("devices", devices)
    job = Job(
        devices=resolve_devices("cpu"),
        environment=LaunchEnvironment(),
        model=model,
        precision=precision,
        accumulate=accumulate,
        free_nbytes=parse_nbytes(memory) if isinstance(memory, str) else memory,
    )
    share = batch if samples is None else resized(batch, samples)
    found = measure_footprint(
        model, optimizer, share, step, precision=precision, device=torch.device("cuda", 0)
    )
    job = replace(job, footprint=found)
    return table_of(job, registry.backends(), devices=devices, kind="cuda")


def _free(job: Job, model: nn.Module, optimizer: Optimizer | None) -> int | None:
    """Return the free bytes of each device, those that the model occupies already included."""
    device, devices = job.devices[0], len(job.devices)
    free = free_nbytes(device, processes=job.environment.local_world_size * devices)
    if free is None:
        return None
    states = [] if optimizer is None else tree_leaves([dict(state) for state in optimizer.state.values()])
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    held = {id(t): t for t in [*model.parameters(), *model.buffers(), *gradients, *states]}
    there = [t for t in held.values() if isinstance(t, Tensor) and t.device.type == device.type]
    free = max(0, free - RESERVED.get(device.type, RESERVED_ELSEWHERE))
    return free + sum(t.numel() * t.element_size() for t in there)


def _measure(model: nn.Module, job: Job, work: Work) -> Footprint:
    traits = job.traits
    # No step for DTensors: it makes collectives, and only rank 0 is here.
    batch = None if traits is not None and traits.has_dtensors else _one_share(work.loader, job)
    found = measure_footprint(
        model,
        work.optimizer,
        batch,
        work.step,
        precision=job.precision,
        device=job.devices[0],
        recomputation=job.recomputation,
    )
    return replace(found, part=_part(_batch_size(work.loader), _device_count(job)))


def _part(samples: int | None, devices: int) -> float:
    """Return the share of a device, divided by the whole samples that it gets at most."""
    return samples / devices / -(-samples // devices) if samples else 1.0


def _device_count(job: Job) -> int:
    return job.environment.world_size * len(job.devices)


def _batch_size(loader: Any) -> int | None:
    """Return the number of samples in a loader's batches, if it is known."""
    if not isinstance(loader, DataLoader) or not hasattr(loader.dataset, "__getitem__"):
        return None
    size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
    return size if isinstance(size, int) else None


def _one_share(loader: Any, job: Job) -> Any:
    """Return one device's share of a batch, from the first samples; ``None`` if it cannot be made.

    The random generators are restored.
    """
    size = _batch_size(loader)
    if size is None:
        return None
    share = -(-size // _device_count(job))
    kept = capture_rng_state(job.devices)
    try:
        return loader.collate_fn([loader.dataset[i] for i in range(share)])
    except Exception:  # noqa: BLE001 - any error of the user's dataset: training will raise it again
        return None
    finally:
        restore_rng_state(kept)


# -- Notes on out-of-memory errors ----------------------------------------------------------------


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
    remedy = (
        "less is needed with a smaller batch and accumulate=, precision='bf16-mixed', or more devices"
        if need is None
        else need.remedy
    )
    more = "" if need else "\ntrainer.estimate(model, optimizer, batch, step) shows what each backend needs"
    return f"{_HEAD}{remedy}.\n{selection}{more}"
