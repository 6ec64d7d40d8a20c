"""Tensor parallelism with plain tensors: parallel layers, loss and sharded state."""

from typing import TYPE_CHECKING

from tp_core import lazy_exports

from tp_shard import _names

if TYPE_CHECKING:
    from tp_shard import distributed, nn, plans
    from tp_shard._checkpoint import load_sharded, save_sharded
    from tp_shard._clip import clip_grad_norm_
    from tp_shard._ddp import register_ddp_parameters_to_ignore
    from tp_shard._errors import OutOfRangeError
    from tp_shard._export import export
    from tp_shard._marks import get_parallel_dim, register_parallel_attribute, register_parallel_dim
    from tp_shard._optimizer_state import collect_optimizer_state_dict, relocate_optimizer_state_dict
    from tp_shard._parameters import parameter_groups
    from tp_shard._plan import Column, Row, Sequence, Vocab, parallelize
    from tp_shard._random import RandomTracker
    from tp_shard._scaler import GradScaler
    from tp_shard._slice import slice  # noqa: A004 - the name that its users know
    from tp_shard._state import collect_state_dict, relocate_state_dict
    from tp_shard._summary import summary

_PARALLEL_ATTR = _PARALLEL_DIM = _names.PARALLEL_DIM
_ORDER_TYPE = _names.ORDER_TYPE

__all__ = [
    "Column",
    "GradScaler",
    "OutOfRangeError",
    "RandomTracker",
    "Row",
    "Sequence",
    "Vocab",
    "clip_grad_norm_",
    "collect_optimizer_state_dict",
    "collect_state_dict",
    "distributed",
    "export",
    "get_parallel_dim",
    "load_sharded",
    "nn",
    "parallelize",
    "parameter_groups",
    "plans",
    "register_ddp_parameters_to_ignore",
    "register_parallel_attribute",
    "register_parallel_dim",
    "relocate_optimizer_state_dict",
    "relocate_state_dict",
    "save_sharded",
    "slice",
    "summary",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "_checkpoint": ["load_sharded", "save_sharded"],
            "_clip": ["clip_grad_norm_"],
            "_ddp": ["register_ddp_parameters_to_ignore"],
            "_errors": ["OutOfRangeError"],
            "_export": ["export"],
            "_marks": ["get_parallel_dim", "register_parallel_attribute", "register_parallel_dim"],
            "_optimizer_state": ["collect_optimizer_state_dict", "relocate_optimizer_state_dict"],
            "_parameters": ["parameter_groups"],
            "_plan": ["Column", "Row", "Sequence", "Vocab", "parallelize"],
            "_random": ["RandomTracker"],
            "_scaler": ["GradScaler"],
            "_slice": ["slice"],
            "_state": ["collect_state_dict", "relocate_state_dict"],
            "_summary": ["summary"],
            "distributed": [],
            "nn": [],
            "plans": [],
        },
    )
