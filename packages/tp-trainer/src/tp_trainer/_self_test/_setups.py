"""Where each backend can be tried on this host."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from tp_core import LaunchEnvironment, resolve_devices
from tp_core.plugins import Backend, Contribution, Job, Verdict

__all__ = ["Setup", "find_setups"]


@dataclass(frozen=True, slots=True)
class Setup:
    """A backend, and the processes and devices that it is tried with.

    Attributes:
        backend: Its name.
        origin: The distribution that brings it, and its version.
        processes: How many ranks.
        devices: The devices of one process, or one for each rank.
        unfit: Why the backend cannot be tried here; empty if it can.
    """

    backend: str
    origin: str
    processes: int = 1
    devices: tuple[torch.device, ...] = ()
    unfit: str = ""


def find_setups(backends: Iterable[Contribution[Backend[Any]]], *, ranks: int) -> list[Setup]:
    """Return every setup of this host that each backend says it fits; one that says why, where it fits none.

    Args:
        backends: The backends.
        ranks: How many processes there are on the CPU; on accelerators there is one for each.
    """
    ways = list(_ways(ranks))
    found: list[Setup] = []
    for contribution in backends:
        backend = contribution.item
        origin = f"{contribution.distribution} {contribution.version}".rstrip()
        verdicts = [(way, _assess(backend, *way)) for way in ways]
        fitting = [Setup(backend.name, origin, *way) for way, verdict in verdicts if verdict.is_fit]
        reasons = list(dict.fromkeys(verdict.reason for _, verdict in verdicts))
        found += fitting or [Setup(backend.name, origin, unfit="; or ".join(reasons))]
    return found


def _ways(ranks: int) -> Iterable[tuple[int, tuple[torch.device, ...]]]:
    """Yield processes and devices: the CPU and the accelerators, alone, in one process, one for each rank."""
    cpu, here = torch.device("cpu"), tuple(resolve_devices("auto"))
    accelerators = tuple(device for device in here if device.type != "cpu")
    yield 1, (cpu,)
    yield 1, (cpu, cpu)
    yield ranks, (cpu,) * ranks
    if accelerators:
        yield 1, accelerators[:1]
    if len(accelerators) > 1:
        yield 1, accelerators
        yield len(accelerators), accelerators


def _assess(backend: Backend[Any], processes: int, devices: tuple[torch.device, ...]) -> Verdict:
    environment = LaunchEnvironment(world_size=processes, local_world_size=processes)
    job = Job(
        devices=devices if processes == 1 else devices[:1], environment=environment, explicit_devices=True
    )
    try:
        return backend.assess(job)
    except Exception as error:  # noqa: BLE001 - a plugin may raise anything
        return Verdict.unfit(f"its assessment raised {type(error).__name__}: {error}")
