"""What a job needs of memory, found out before a backend is chosen for it, and alike on all ranks."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from tp_core import tree_leaves
from tp_core.internal import free_nbytes
from tp_core.plugins import Backend, Contribution, Footprint, Job

from tp_trainer._checkpoint import _generators as generators
from tp_trainer._memory._footprint import parse_nbytes
from tp_trainer._memory._table import MemoryTable, resized, row_count_of, table_of
from tp_trainer._opening._agreement import agree_at_start

__all__ = ["Work", "add_memory", "estimate_job"]

LEAST_NBYTES = 64 * 2**20
"""Smaller models are not looked at: this is known without asking anybody."""
LEAST_PART = 0.05
"""Nor are those whose weights, gradients and optimizer state take less than this part of what is free."""

RESERVED = {"cpu": 128 * 2**20}
RESERVED_ELSEWHERE = 512 * 2**20
"""What of a device is not for tensors: libraries load code and take workspaces when first used."""


@dataclass(frozen=True, slots=True)
class Work:
    """What is known of a job's steps.

    Attributes:
        optimizer: The optimizer, if it is known yet.
        loader: What yields the batches of the whole job.
        step: The step.
    """

    optimizer: Optimizer | None = None
    loader: Any = None
    step: Callable[[Any, Any], Any] | None = None


def add_memory(job: Job, work: Work) -> Job:
    """Return the job with what it takes and what is free; as it is where that is little or cannot be known.

    Raises:
        DisagreementError: The ranks' models differ in size.
        RankFailedError: Ranks did not come in time.

    Collectives: an exchange through the launcher's store, for a large model.
    """
    traits, model = job.traits, job.model
    if traits is None or model is None or traits.nbytes < LEAST_NBYTES:
        return job

    def decide(everyones: list[int | None]) -> dict[str, Any]:
        known = [free for free in everyones if free is not None]
        free = min(known, default=None)
        if free is None or 4 * traits.nbytes < LEAST_PART * free:
            return {"footprint": None, "free": None}
        return {"footprint": _measure(model, job, work).to_dict(), "free": free}

    found = agree_at_start(
        job.environment,
        {"bytes of the model": traits.nbytes},
        told=_free(job, model, work.optimizer),
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
    """Return what a job would need; see :meth:`tp_trainer.Trainer.estimate`."""
    from tp_trainer._memory._footprint import measure_footprint

    count = devices or job.environment.world_size * len(job.devices)
    job = replace(job, model=model)
    free = parse_nbytes(memory) if isinstance(memory, str) else memory
    if free is None:
        free = _free(job, model, work.optimizer)
    rows = row_count_of(batch)
    share = batch if rows is None else resized(batch, -(-rows // count))
    footprint = measure_footprint(
        model, work.optimizer, share, work.step, precision=job.precision, device=job.devices[0]
    )
    job = replace(job, footprint=footprint, free_nbytes=free)
    return table_of(job, backends, devices=count, kind=job.devices[0].type)


def _free(job: Job, model: nn.Module, optimizer: Optimizer | None) -> int | None:
    """Return what is free on each device, with what the model holds there already."""
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
    from tp_trainer._memory._footprint import measure_footprint  # seldom needed, and torch's part is large

    traits = job.traits
    # DTensors exchange values in a step in ways of their own, and here is one rank alone.
    batch = None if traits is not None and traits.has_dtensors else _one_share(work.loader, job)
    return measure_footprint(
        model, work.optimizer, batch, work.step, precision=job.precision, device=job.devices[0]
    )


def _one_share(loader: Any, job: Job) -> Any:
    """Return one device's share of a batch, made of the first samples; ``None`` if that cannot be made.

    Random numbers that samples draw are put back.
    """
    if not isinstance(loader, DataLoader) or not hasattr(loader.dataset, "__getitem__"):
        return None
    size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
    if not isinstance(size, int):
        return None
    share = -(-size // (job.environment.world_size * len(job.devices)))
    kept = generators.capture(job.devices)
    try:
        return loader.collate_fn([loader.dataset[i] for i in range(share)])
    except Exception:  # noqa: BLE001 - a dataset of anybody: training will tell what is wrong with it
        return None
    finally:
        generators.restore(kept)
