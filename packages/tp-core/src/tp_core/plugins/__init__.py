"""The interface for authors of plugins: contracts, helpers to implement them, and the registry.

A distribution joins by an entry point in the group ``tp.plugins``, which names a light module with
hook implementations. A script joins by ``registry.register(...)``.
"""

from typing import TYPE_CHECKING

from tp_core._lazy import lazy_exports

if TYPE_CHECKING:
    from tp_core._contracts._backend import Backend as Backend
    from tp_core._contracts._backend import NoOptions as NoOptions
    from tp_core._contracts._backend import Verdict as Verdict
    from tp_core._contracts._callback import Callback as Callback
    from tp_core._contracts._callback import NamedCallback as NamedCallback
    from tp_core._contracts._callback import RunView as RunView
    from tp_core._contracts._collate import CollateAdapter as CollateAdapter
    from tp_core._contracts._engine import Engine as Engine
    from tp_core._contracts._engine import Pool as Pool
    from tp_core._contracts._job import Footprint as Footprint
    from tp_core._contracts._job import Job as Job
    from tp_core._contracts._job import MemoryNeed as MemoryNeed
    from tp_core._contracts._job import ModelTraits as ModelTraits
    from tp_core._contracts._job import Precision as Precision
    from tp_core._contracts._job import replicated_memory as replicated_memory
    from tp_core._contracts._logger import Logger as Logger
    from tp_core._contracts._logger import LoggerFactory as LoggerFactory
    from tp_core._contracts._logger import RunInfo as RunInfo
    from tp_core._contracts._logger import RunStatus as RunStatus
    from tp_core._contracts._process_group_session import ProcessGroupSession as ProcessGroupSession
    from tp_core._contracts._session import ReduceOp as ReduceOp
    from tp_core._contracts._session import Session as Session
    from tp_core._contracts._session import StepOutput as StepOutput
    from tp_core._data._batches import Share as Share
    from tp_core._data._batches import count_samples as count_samples
    from tp_core._data._loader import PreparedLoader as PreparedLoader
    from tp_core._data._parts import Parts as Parts
    from tp_core._data._step_outputs import LossReduction as LossReduction
    from tp_core._data._step_outputs import combine_outputs as combine_outputs
    from tp_core._data._step_outputs import read_weight as read_weight
    from tp_core._data._step_outputs import restore_order as restore_order
    from tp_core._data._step_outputs import split_weight as split_weight
    from tp_core._fully_sharded._options import FullyShardOptions as FullyShardOptions
    from tp_core._launch._process_group import join_process_group as join_process_group
    from tp_core._tensors._deferred import build_deferred as build_deferred
    from tp_core._tensors._deferred import initial_value as initial_value
    from tp_core._tensors._deferred import is_deferred as is_deferred
    from tp_core._tensors._deferred import materialize as materialize
    from tp_core._tensors._slices import SHARDED_ATTRIBUTE as SHARDED_ATTRIBUTE
    from tp_core._tensors._slices import TensorSlice as TensorSlice
    from tp_core._tensors._slices import is_sharded as is_sharded
    from tp_core.plugins._hooks import BrokenPlugin as BrokenPlugin
    from tp_core.plugins._hooks import Command as Command
    from tp_core.plugins._hooks import Contribution as Contribution
    from tp_core.plugins._hooks import HookSpecs as HookSpecs
    from tp_core.plugins._hooks import PluginInfo as PluginInfo
    from tp_core.plugins._markers import CONTRACT_VERSION as CONTRACT_VERSION
    from tp_core.plugins._markers import hookimpl as hookimpl
    from tp_core.plugins._registry import ENTRY_POINT_GROUP as ENTRY_POINT_GROUP
    from tp_core.plugins._registry import NameConflict as NameConflict
    from tp_core.plugins._registry import PluginRegistry as PluginRegistry
    from tp_core.plugins._registry import registry as registry
    from tp_core.plugins._select import Candidate as Candidate
    from tp_core.plugins._select import Selection as Selection
    from tp_core.plugins._select import select as select
else:
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        {
            "tp_core._contracts._backend": ["Backend", "NoOptions", "Verdict"],
            "tp_core._contracts._callback": ["Callback", "NamedCallback", "RunView"],
            "tp_core._contracts._collate": ["CollateAdapter"],
            "tp_core._contracts._engine": ["Engine", "Pool"],
            "tp_core._contracts._job": [
                "Footprint",
                "Job",
                "MemoryNeed",
                "ModelTraits",
                "Precision",
                "replicated_memory",
            ],
            "tp_core._contracts._logger": ["Logger", "LoggerFactory", "RunInfo", "RunStatus"],
            "tp_core._contracts._process_group_session": ["ProcessGroupSession"],
            "tp_core._contracts._session": ["ReduceOp", "Session", "StepOutput"],
            "tp_core._data._batches": ["Share", "count_samples"],
            "tp_core._data._loader": ["PreparedLoader"],
            "tp_core._data._parts": ["Parts"],
            "tp_core._data._step_outputs": [
                "LossReduction",
                "combine_outputs",
                "read_weight",
                "restore_order",
                "split_weight",
            ],
            "tp_core._fully_sharded._options": ["FullyShardOptions"],
            "tp_core._launch._process_group": ["join_process_group"],
            "tp_core._tensors._deferred": ["build_deferred", "initial_value", "is_deferred", "materialize"],
            "tp_core._tensors._slices": ["SHARDED_ATTRIBUTE", "TensorSlice", "is_sharded"],
            "tp_core.plugins._hooks": ["BrokenPlugin", "Command", "Contribution", "HookSpecs", "PluginInfo"],
            "tp_core.plugins._markers": ["CONTRACT_VERSION", "hookimpl"],
            "tp_core.plugins._registry": ["ENTRY_POINT_GROUP", "NameConflict", "PluginRegistry", "registry"],
            "tp_core.plugins._select": ["Candidate", "Selection", "select"],
        },
    )
