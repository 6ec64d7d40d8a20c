"""Tensor parallelism with plain tensors: parallel layers, loss and sharded state."""

from typing import TYPE_CHECKING

from tp_core.internal import lazy_exports

from tp_shard import _names

if TYPE_CHECKING:
    from tp_shard import distributed, errors, nn, plans
    from tp_shard._backend import ShardOptions
    from tp_shard._checkpoint import load_sharded, save_sharded
    from tp_shard._clip import clip_grad_norm_
    from tp_shard._ddp import register_ddp_parameters_to_ignore
    from tp_shard._drift import check_gradients
    from tp_shard._export import export
    from tp_shard._marks import get_parallel_dim, register_parallel_attribute, register_parallel_dim
    from tp_shard._optimizer_state import collect_optimizer_state_dict, relocate_optimizer_state_dict
    from tp_shard._parameters import parameter_groups
    from tp_shard._plan import parallelize
    from tp_shard._pretrained import load_pretrained
    from tp_shard._random import RandomTracker
    from tp_shard._row_updates import update_sampled_rows
    from tp_shard._scaler import GradScaler
    from tp_shard._slice import slice as slice  # not in __all__: it would shadow the builtin
    from tp_shard._state import collect_state_dict, relocate_state_dict
    from tp_shard._styles import Column, Experts, Gathered, Local, Replicated, Row, Sequence, Vocab
    from tp_shard._summary import summary
    from tp_shard._verify import Report, verify
    from tp_shard.errors import OutOfRangeError, VerificationError

    __version__: str

_PARALLEL_ATTR = _PARALLEL_DIM = _names.PARALLEL_DIM
_ORDER_TYPE = _names.ORDER_TYPE

__all__ = [
    "Column",
    "Experts",
    "Gathered",
    "GradScaler",
    "Local",
    "OutOfRangeError",
    "RandomTracker",
    "Replicated",
    "Report",
    "Row",
    "Sequence",
    "ShardOptions",
    "VerificationError",
    "Vocab",
    "check_gradients",
    "clip_grad_norm_",
    "collect_optimizer_state_dict",
    "collect_state_dict",
    "distributed",
    "errors",
    "export",
    "get_parallel_dim",
    "load_pretrained",
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
    "summary",
    "update_sampled_rows",
    "verify",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "_backend": ["ShardOptions"],
            "_checkpoint": ["load_sharded", "save_sharded"],
            "_clip": ["clip_grad_norm_"],
            "_ddp": ["register_ddp_parameters_to_ignore"],
            "_drift": ["check_gradients"],
            "errors": ["OutOfRangeError", "VerificationError"],
            "_export": ["export"],
            "_marks": ["get_parallel_dim", "register_parallel_attribute", "register_parallel_dim"],
            "_optimizer_state": ["collect_optimizer_state_dict", "relocate_optimizer_state_dict"],
            "_parameters": ["parameter_groups"],
            "_plan": ["parallelize"],
            "_pretrained": ["load_pretrained"],
            "_random": ["RandomTracker"],
            "_row_updates": ["update_sampled_rows"],
            "_scaler": ["GradScaler"],
            "_slice": ["slice"],
            "_state": ["collect_state_dict", "relocate_state_dict"],
            "_styles": ["Column", "Experts", "Gathered", "Local", "Replicated", "Row", "Sequence", "Vocab"],
            "_summary": ["summary"],
            "_verify": ["Report", "verify"],
            "distributed": [],
            "nn": [],
            "plans": [],
        },
    )
