"""For authors of plugins: the contracts, what implements them, and the registry that they meet in.

A distribution joins by an entry point in the group ``tp.plugins`` that names a light module with
hook implementations; a script joins by ``registry.register(...)``.
"""

from typing import TYPE_CHECKING

from tp_core._lazy import lazy_exports

if TYPE_CHECKING:
    from tp_core._contracts._backend import Backend, NoOptions
    from tp_core._contracts._callback import Callback, NamedCallback, RunView
    from tp_core._contracts._collate import CollateAdapter
    from tp_core._contracts._engine import Engine, Pool
    from tp_core._contracts._job import Job, ModelTraits, Precision
    from tp_core._contracts._logger import Logger, LoggerFactory, RunInfo, RunStatus
    from tp_core._contracts._process_group_session import ProcessGroupSession
    from tp_core._contracts._session import ReduceOp, Session, StepOutput
    from tp_core._contracts._verdict import Verdict
    from tp_core._data._batches import Share
    from tp_core._data._counting import count_samples
    from tp_core._data._loader import PreparedLoader
    from tp_core._data._parts import Parts
    from tp_core._fully_sharded._options import FullyShardOptions
    from tp_core._launch._join import join_process_group
    from tp_core._steps._outputs import (
        LossReduction,
        combine_outputs,
        read_weight,
        restore_order,
        split_weight,
    )
    from tp_core._tensors._deferred import build_deferred, initial_value, is_deferred, materialize
    from tp_core._tensors._sharding import SHARDED_ATTRIBUTE, is_sharded
    from tp_core._tensors._slices import TensorSlice
    from tp_core.plugins._conflicts import NameConflict
    from tp_core.plugins._contribution import BrokenPlugin, Contribution, PluginInfo
    from tp_core.plugins._discovery import ENTRY_POINT_GROUP
    from tp_core.plugins._markers import CONTRACT_VERSION, hookimpl
    from tp_core.plugins._registry import PluginRegistry, registry
    from tp_core.plugins._select import Candidate, Selection, select
    from tp_core.plugins._spec import Command, HookSpecs

__all__ = [
    "CONTRACT_VERSION",
    "ENTRY_POINT_GROUP",
    "SHARDED_ATTRIBUTE",
    "Backend",
    "BrokenPlugin",
    "Callback",
    "Candidate",
    "CollateAdapter",
    "Command",
    "Contribution",
    "Engine",
    "FullyShardOptions",
    "HookSpecs",
    "Job",
    "Logger",
    "LoggerFactory",
    "LossReduction",
    "ModelTraits",
    "NameConflict",
    "NamedCallback",
    "NoOptions",
    "Parts",
    "PluginInfo",
    "PluginRegistry",
    "Pool",
    "Precision",
    "PreparedLoader",
    "ProcessGroupSession",
    "ReduceOp",
    "RunInfo",
    "RunStatus",
    "RunView",
    "Selection",
    "Session",
    "Share",
    "StepOutput",
    "TensorSlice",
    "Verdict",
    "build_deferred",
    "combine_outputs",
    "count_samples",
    "hookimpl",
    "initial_value",
    "is_deferred",
    "is_sharded",
    "join_process_group",
    "materialize",
    "read_weight",
    "registry",
    "restore_order",
    "select",
    "split_weight",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "._contracts._backend": ["Backend", "NoOptions"],
            "._contracts._callback": ["Callback", "NamedCallback", "RunView"],
            "._contracts._collate": ["CollateAdapter"],
            "._contracts._engine": ["Engine", "Pool"],
            "._contracts._job": ["Job", "ModelTraits", "Precision"],
            "._contracts._logger": ["Logger", "LoggerFactory", "RunInfo", "RunStatus"],
            "._contracts._process_group_session": ["ProcessGroupSession"],
            "._contracts._session": ["ReduceOp", "Session", "StepOutput"],
            "._contracts._verdict": ["Verdict"],
            "._data._batches": ["Share"],
            "._data._counting": ["count_samples"],
            "._data._loader": ["PreparedLoader"],
            "._data._parts": ["Parts"],
            "._fully_sharded._options": ["FullyShardOptions"],
            "._launch._join": ["join_process_group"],
            "._steps._outputs": [
                "LossReduction",
                "combine_outputs",
                "read_weight",
                "restore_order",
                "split_weight",
            ],
            "._tensors._deferred": ["build_deferred", "initial_value", "is_deferred", "materialize"],
            "._tensors._sharding": ["SHARDED_ATTRIBUTE", "is_sharded"],
            "._tensors._slices": ["TensorSlice"],
            "_conflicts": ["NameConflict"],
            "_contribution": ["BrokenPlugin", "Contribution", "PluginInfo"],
            "_discovery": ["ENTRY_POINT_GROUP"],
            "_markers": ["CONTRACT_VERSION", "hookimpl"],
            "_registry": ["PluginRegistry", "registry"],
            "_select": ["Candidate", "Selection", "select"],
            "_spec": ["Command", "HookSpecs"],
        },
    )
