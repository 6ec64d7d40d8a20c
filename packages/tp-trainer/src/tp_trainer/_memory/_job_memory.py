"""The memory of a job, before the choice of a backend."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from tp_core import free_nbytes, tree_leaves
from tp_core.discovery import Contribution
from tp_core.jobs import Footprint
from tp_core.output import get_logger
from tp_core.plugins import Backend, Job
from tp_core.random import preserve_rng_state

from tp_trainer._activations import recomputations
from tp_trainer._memory._memory_table import MemoryTable, parse_nbytes, resized, row_count_of, table_of
from tp_trainer._memory._step_footprint import measure_footprint
from tp_trainer._opening._agreement import agree_at_start

log = get_logger("tp_trainer")

RESERVED = {"cpu": 128 * 2**20}
RESERVED_ELSEWHERE = 512 * 2**20
"""The bytes of a device that are not for tensors: libraries load code and take workspaces at first use."""


@dataclass(frozen=True, slots=True)
class StepParts:
    """The known parts of a job's steps.

    Attributes:
        optimizer: The optimizer, if known.
        loader: The loader of the whole job's batches, if known.
        step: The step, if known.
    """

    optimizer: Optimizer | None = None
    loader: Any = None
    step: Callable[[Any, Any], Any] | None = None


def add_memory(job: Job, work: StepParts) -> Iterator[Job]:
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
    for recomputation in recomputations(job.model):
        measured = _with_memory(replace(job, recomputation=recomputation), work)
        if measured.footprint is None or measured.footprint.activations is None:
            if job.environment.is_main:
                if measured.footprint is None:
                    why = "the free memory is not known"
                else:
                    why = measured.footprint.unknown
                log.warning(
                    "activation_checkpointing='auto' has nothing to go by, and changes nothing: %s; "
                    "checkpoint_activations(model) does not need to know",
                    why,
                )
            yield replace(measured, recomputation=None)
            return
        yield measured


def _with_memory(job: Job, work: StepParts) -> Job:
    traits, model = job.traits, job.model
    if traits is None or model is None:
        return job

    def decide(everyones: list[int | None]) -> dict[str, Any]:
        free_bytes = [free for free in everyones if free is not None]
        free = min(free_bytes, default=None)
        if free is None or job.is_small(free):
            return {"footprint": None, "free": None}
        return {"footprint": _measure(model, job, work).to_dict(), "free": free}

    agreed = agree_at_start(
        job.environment,
        {"bytes of the model": traits.nbytes},
        message=_free(job, model, work.optimizer),
        decide=decide,
    )
    if agreed["footprint"] is None:
        return job
    return replace(job, footprint=Footprint(**agreed["footprint"]), free_nbytes=agreed["free"])


def estimate_job(
    job: Job,
    work: StepParts,
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
    if rows is None:
        share = batch
    else:
        share = resized(batch, -(-rows // count))
    backends = list(backends)
    tried = [None] if job.recomputation is None else recomputations(model)
    for recomputation in tried:
        job = replace(job, recomputation=recomputation)
        footprint = measure_footprint(
            model,
            work.optimizer,
            share,
            work.step,
            precision=job.precision,
            device=job.devices[0],
            recomputation=recomputation,
        )
        footprint = replace(footprint, part=_part(rows, count))
        job = replace(job, footprint=footprint, free_nbytes=free)
        table = table_of(job, backends, devices=count, kind=job.devices[0].type)
        if table.best is not None or footprint.activations is None:
            break
    return table


def _free(job: Job, model: nn.Module, optimizer: Optimizer | None) -> int | None:
    """Return the free bytes of each device, those that the model occupies already included."""
    device, devices = job.devices[0], len(job.devices)
    free = free_nbytes(device, processes=job.environment.local_world_size * devices)
    if free is None:
        return None
    states = [] if optimizer is None else tree_leaves([dict(state) for state in optimizer.state.values()])
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    occupied = {id(t): t for t in [*model.parameters(), *model.buffers(), *gradients, *states]}
    on_device = [t for t in occupied.values() if isinstance(t, Tensor) and t.device.type == device.type]
    free = max(0, free - RESERVED.get(device.type, RESERVED_ELSEWHERE))
    return free + sum(t.numel() * t.element_size() for t in on_device)


def _measure(model: nn.Module, job: Job, work: StepParts) -> Footprint:
    traits = job.traits
    # No step for DTensors: it makes collectives, and only rank 0 is here.
    if traits is not None and traits.has_dtensors:
        batch = None
    else:
        batch = _one_share(work.loader, job)
    footprint = measure_footprint(
        model,
        work.optimizer,
        batch,
        work.step,
        precision=job.precision,
        device=job.devices[0],
        recomputation=job.recomputation,
    )
    return replace(footprint, part=_part(_batch_size(work.loader), _device_count(job)))


def _part(samples: int | None, devices: int) -> float:
    """Return the share of a device, divided by the whole samples that it gets at most."""
    if samples:
        return samples / devices / -(-samples // devices)
    return 1.0


def _device_count(job: Job) -> int:
    return job.environment.world_size * len(job.devices)


def _batch_size(loader: Any) -> int | None:
    """Return the number of samples in a loader's batches, if it is known."""
    if not isinstance(loader, DataLoader) or not hasattr(loader.dataset, "__getitem__"):
        return None
    size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
    if isinstance(size, int):
        return size
    return None


def _one_share(loader: Any, job: Job) -> Any:
    """Return one device's share of a batch, from the first samples; ``None`` if it cannot be made.

    The random generators are restored.
    """
    size = _batch_size(loader)
    if size is None:
        return None
    share = -(-size // _device_count(job))
    try:
        with preserve_rng_state():
            return loader.collate_fn([loader.dataset[i] for i in range(share)])
    except Exception:  # noqa: BLE001 - any error of the user's dataset: training will raise it again
        return None
