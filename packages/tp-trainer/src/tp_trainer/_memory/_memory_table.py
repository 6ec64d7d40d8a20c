"""The memory that a job needs under each installed backend, as a table; the devices need not exist."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from tp_core import LaunchEnvironment, tree_leaves, tree_map
from tp_core.discovery import Contribution
from tp_core.errors import ConfigError
from tp_core.jobs import Footprint, Recomputation
from tp_core.plugins import Backend, Job, Verdict

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def parse_nbytes(text: str) -> int:
    """Return the bytes of "80GiB", "512 MiB" or "24e9".

    Raises:
        ConfigError: The text is something else.
    """
    match = re.fullmatch(r"([0-9.]+(?:e[0-9]+)?)\s*([KMGT]?)(i?)B?", text.strip(), flags=re.IGNORECASE)
    if match is None or match[1].count(".") > 1 or not match[1].strip("."):
        msg = f"an amount of memory is written 80GiB, 512MiB or 24e9, got {text!r}"
        raise ConfigError(msg)
    size = _UNITS[match[2].upper()]
    if not match[3]:  # powers of ten
        size = 1000 ** list(_UNITS).index(match[2].upper())
    return int(float(match[1]) * size)


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
            if verdict.memory is None:
                reason = verdict.reason
            else:
                reason = str(verdict.memory)
            if not verdict.is_fit and verdict.remedy:
                more = f"; {verdict.remedy}"
            else:
                more = ""
            fits = "fits " if verdict.is_fit else "unfit"
            lines.append(f"  {mark}  {name:{width}}  {fits}  {reason}{more}")
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
    jobs = [
        replace(job, environment=processes, devices=names[:1]),
        replace(job, environment=LaunchEnvironment(), devices=names),
    ]
    verdicts = {c.item.name: _best([_assess(c.item, each) for each in jobs]) for c in backends}
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
        if verdict.is_fit:
            need = backend.estimate_memory(job)
        else:
            need = None
    except Exception as error:  # noqa: BLE001 - a plugin may raise anything
        return Verdict.unfit(f"its assessment raised {type(error).__name__}: {error}")
    if need is None:
        return verdict
    return verdict.with_memory(need)


def _best(verdicts: list[Verdict]) -> tuple[Verdict, float]:
    """Return the better verdict, and a bonus for a process per device, which is faster."""
    by_process, in_one = verdicts
    if _rank(by_process) >= _rank(in_one):
        bonus = 1000.0 if by_process.is_fit else 0.0
        return by_process, bonus
    return in_one, 0.0


def _rank(verdict: Verdict) -> float:
    if verdict.score is not None:
        return verdict.score
    if verdict.lacks_memory:
        return -1.0
    return -2.0
