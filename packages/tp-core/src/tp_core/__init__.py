"""What the tp packages share: devices, transfer, launch environment, contracts and registry."""

from tp_core import errors, plugins
from tp_core._backend import Backend, NoOptions
from tp_core._collate import CollateAdapter, Parts
from tp_core._devices import available_devices, device_of_rank, resolve_devices
from tp_core._engine import Engine, Pool
from tp_core._environment import LaunchEnvironment
from tp_core._job import SHARDED_ATTRIBUTE, Job, LossReduction, ModelTraits, is_sharded
from tp_core._load import DeviceLoad, device_loads
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
    "available_devices",
    "count_samples",
    "device_loads",
    "device_of_rank",
    "errors",
    "is_sharded",
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
