"""What the tp packages share: devices, transfer, launch environment, contracts and registry.

Names are imported when they are first used: most of them need torch, which takes most of a second,
and some of those who import this package, such as worker processes, need none of it.
"""

from typing import TYPE_CHECKING

from tp_core import errors
from tp_core._lazy import lazy_exports

if TYPE_CHECKING:
    from tp_core import plugins
    from tp_core._backend import Backend, NoOptions
    from tp_core._batches import Share, split_evenly
    from tp_core._collate import CollateAdapter, Parts
    from tp_core._containers import Container, PerType, containers
    from tp_core._devices import (
        DeviceSpec,
        as_device,
        available_devices,
        device_of_rank,
        resolve_devices,
    )
    from tp_core._engine import Engine, Pool
    from tp_core._environment import LaunchEnvironment
    from tp_core._job import SHARDED_ATTRIBUTE, Job, LossReduction, ModelTraits, Precision, is_sharded
    from tp_core._load import DeviceLoad, device_loads, least_busy
    from tp_core._loader import PreparedLoader, count_samples
    from tp_core._process_group_session import ProcessGroupSession
    from tp_core._seeding import seeded
    from tp_core._select import KNOWN_BACKENDS, Candidate, Selection, select
    from tp_core._session import ReduceOp, Session, StepOutput
    from tp_core._store import rendezvous_store
    from tp_core._tensor_files import read_tensors, tensor_infos, write_tensors
    from tp_core._tensor_slices import TensorInfo, TensorSlice
    from tp_core._transfer import recursive_pin, recursive_to
    from tp_core._tree import tree_leaves, tree_map
    from tp_core._verdict import Verdict

__all__ = [
    "KNOWN_BACKENDS",
    "SHARDED_ATTRIBUTE",
    "Backend",
    "Candidate",
    "CollateAdapter",
    "Container",
    "DeviceLoad",
    "DeviceSpec",
    "Engine",
    "Job",
    "LaunchEnvironment",
    "LossReduction",
    "ModelTraits",
    "NoOptions",
    "Parts",
    "PerType",
    "Pool",
    "Precision",
    "PreparedLoader",
    "ProcessGroupSession",
    "ReduceOp",
    "Selection",
    "Session",
    "Share",
    "StepOutput",
    "TensorInfo",
    "TensorSlice",
    "Verdict",
    "as_device",
    "available_devices",
    "containers",
    "count_samples",
    "device_loads",
    "device_of_rank",
    "errors",
    "is_sharded",
    "lazy_exports",
    "least_busy",
    "plugins",
    "read_tensors",
    "recursive_pin",
    "recursive_to",
    "rendezvous_store",
    "resolve_devices",
    "seeded",
    "select",
    "split_evenly",
    "tensor_infos",
    "tree_leaves",
    "tree_map",
    "write_tensors",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "_backend": ["Backend", "NoOptions"],
            "_batches": ["Share", "split_evenly"],
            "_collate": ["CollateAdapter", "Parts"],
            "_containers": ["Container", "PerType", "containers"],
            "_devices": ["DeviceSpec", "as_device", "available_devices", "device_of_rank", "resolve_devices"],
            "_engine": ["Engine", "Pool"],
            "_environment": ["LaunchEnvironment"],
            "_job": ["SHARDED_ATTRIBUTE", "Job", "LossReduction", "ModelTraits", "Precision", "is_sharded"],
            "_load": ["DeviceLoad", "device_loads", "least_busy"],
            "_loader": ["PreparedLoader", "count_samples"],
            "_process_group_session": ["ProcessGroupSession"],
            "_seeding": ["seeded"],
            "_select": ["KNOWN_BACKENDS", "Candidate", "Selection", "select"],
            "_session": ["ReduceOp", "Session", "StepOutput"],
            "_store": ["rendezvous_store"],
            "_tensor_files": ["read_tensors", "tensor_infos", "write_tensors"],
            "_tensor_slices": ["TensorInfo", "TensorSlice"],
            "_transfer": ["recursive_pin", "recursive_to"],
            "_tree": ["tree_leaves", "tree_map"],
            "_verdict": ["Verdict"],
            "plugins": [],
        },
    )
