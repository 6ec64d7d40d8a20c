"""What the tp packages share: devices, transfer, launch environment, contracts and registry.

Names are imported when they are first used: most of them need torch, which takes most of a second,
and some of those who import this package, such as worker processes, need none of it.
"""

import importlib
from typing import TYPE_CHECKING, Any

from tp_core import errors

if TYPE_CHECKING:
    from tp_core import plugins
    from tp_core._backend import Backend, NoOptions
    from tp_core._collate import CollateAdapter, Parts
    from tp_core._devices import (
        DeviceSpec,
        as_device,
        available_devices,
        device_of_rank,
        resolve_devices,
    )
    from tp_core._engine import Engine, Pool
    from tp_core._environment import LaunchEnvironment
    from tp_core._job import SHARDED_ATTRIBUTE, Job, LossReduction, ModelTraits, is_sharded
    from tp_core._load import DeviceLoad, device_loads, least_busy
    from tp_core._loader import PreparedLoader, Share, count_samples, seeded, split_evenly
    from tp_core._select import KNOWN_BACKENDS, Candidate, Selection, select
    from tp_core._session import ReduceOp, Session, StepOutput
    from tp_core._store import rendezvous_store
    from tp_core._transfer import recursive_pin, recursive_to
    from tp_core._tree import tree_leaves, tree_map
    from tp_core._verdict import Verdict

__all__ = [
    "KNOWN_BACKENDS",
    "SHARDED_ATTRIBUTE",
    "Backend",
    "Candidate",
    "CollateAdapter",
    "DeviceLoad",
    "DeviceSpec",
    "Engine",
    "Job",
    "LaunchEnvironment",
    "LossReduction",
    "ModelTraits",
    "NoOptions",
    "Parts",
    "Pool",
    "PreparedLoader",
    "ReduceOp",
    "Selection",
    "Session",
    "Share",
    "StepOutput",
    "Verdict",
    "as_device",
    "available_devices",
    "count_samples",
    "device_loads",
    "device_of_rank",
    "errors",
    "is_sharded",
    "least_busy",
    "plugins",
    "recursive_pin",
    "recursive_to",
    "rendezvous_store",
    "resolve_devices",
    "seeded",
    "select",
    "split_evenly",
    "tree_leaves",
    "tree_map",
]

_ORIGINS = {
    "Backend": "tp_core._backend",
    "NoOptions": "tp_core._backend",
    "CollateAdapter": "tp_core._collate",
    "Parts": "tp_core._collate",
    "DeviceSpec": "tp_core._devices",
    "as_device": "tp_core._devices",
    "available_devices": "tp_core._devices",
    "device_of_rank": "tp_core._devices",
    "resolve_devices": "tp_core._devices",
    "Engine": "tp_core._engine",
    "Pool": "tp_core._engine",
    "LaunchEnvironment": "tp_core._environment",
    "SHARDED_ATTRIBUTE": "tp_core._job",
    "Job": "tp_core._job",
    "LossReduction": "tp_core._job",
    "ModelTraits": "tp_core._job",
    "is_sharded": "tp_core._job",
    "DeviceLoad": "tp_core._load",
    "device_loads": "tp_core._load",
    "least_busy": "tp_core._load",
    "PreparedLoader": "tp_core._loader",
    "Share": "tp_core._loader",
    "count_samples": "tp_core._loader",
    "seeded": "tp_core._loader",
    "split_evenly": "tp_core._loader",
    "KNOWN_BACKENDS": "tp_core._select",
    "Candidate": "tp_core._select",
    "Selection": "tp_core._select",
    "select": "tp_core._select",
    "ReduceOp": "tp_core._session",
    "Session": "tp_core._session",
    "StepOutput": "tp_core._session",
    "rendezvous_store": "tp_core._store",
    "recursive_pin": "tp_core._transfer",
    "recursive_to": "tp_core._transfer",
    "tree_leaves": "tp_core._tree",
    "tree_map": "tp_core._tree",
    "Verdict": "tp_core._verdict",
}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name == "plugins":
            return importlib.import_module("tp_core.plugins")
        if name not in _ORIGINS:
            msg = f"module {__name__!r} has no attribute {name!r}"
            raise AttributeError(msg)
        value = getattr(importlib.import_module(_ORIGINS[name]), name)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
