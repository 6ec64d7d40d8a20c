"""What a job would need under each installed backend, as a table, with or without its devices."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from tp_core import LaunchEnvironment, tree_leaves, tree_map
from tp_core.plugins import Backend, Contribution, Footprint, Job, Verdict

__all__ = ["MemoryTable", "resized", "row_count_of", "table_of"]


@dataclass(frozen=True, slots=True)
class MemoryTable:
    """What a job needs on each device under each installed backend; ``str()`` of it is a table for people.

    Attributes:
        verdicts: The backends' verdicts by their names, the best first; ``verdict.memory`` has the numbers.
        footprint: What a device takes that holds the whole model.
        devices: How many devices there would be.
        free_nbytes: What would be free on each of them; ``None`` if that is not known.
    """

    verdicts: Mapping[str, Verdict]
    footprint: Footprint
    devices: int
    free_nbytes: int | None

    @property
    def best(self) -> str | None:
        """The backend that "auto" would take; ``None`` where none fits."""
        return next((name for name, verdict in self.verdicts.items() if verdict.is_fit), None)

    def __str__(self) -> str:
        head = f"training on {self.devices} device{'s' * (self.devices != 1)}, each of them"
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
        """Return it as JSON can say it."""
        return {
            "devices": self.devices,
            "free_bytes": self.free_nbytes,
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
        job: Its model and footprint, and what is free on each device.
        backends: The installed backends.
        devices: How many devices there would be: one process for each, or one process with all.
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
    return MemoryTable(dict(ordered), footprint, devices, job.free_nbytes)


def resized(batch: Any, samples: int) -> Any:
    """Return a batch with another number of samples: the first ones, over and over."""
    rows = row_count_of(batch)
    if rows is None:
        return batch

    def resize(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.dim() or leaf.shape[0] != rows:
            return leaf
        return leaf[torch.arange(samples, device=leaf.device) % rows]

    return tree_map(resize, batch)


def row_count_of(batch: Any) -> int | None:
    """Return how many samples a batch has: the rows of its first tensor; ``None`` if it has no tensor."""
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
    """Return the better verdict of the two ways, and what it counts more: a process per device is faster."""
    by_process, in_one = verdicts
    if _rank(by_process) >= _rank(in_one):
        return by_process, 1000.0 if by_process.is_fit else 0.0
    return in_one, 0.0


def _rank(verdict: Verdict) -> float:
    if verdict.score is not None:
        return verdict.score
    return -1.0 if verdict.lacks_memory else -2.0
