"""Tensor parallelism with plain tensors: parallel layers, loss and sharded state.

Example:
    >>> layer = ts.nn.ParallelLinear(20, 30, dim=-1)  # of one rank; from the same seed torch's own
    >>> layer(torch.ones(8, 20)).shape
    torch.Size([8, 30])

The way of a finished model that is split and trained, and the files that it passes::

    plans.auto, plans.from_hf     _search/: run it and look at what feeds what (_trace), try styles on its
        |                         blocks (_variants, _prove), or go by names and shapes (_named, _probe)
        |   a plan                _plans/_styles: {"name": Column(), ...}
        v
    verify                        _verify/: the whole model beside the split one, on ranks that are threads
        |                         (_simulate, _runs), compared step by step (_judge)
        v
    parallelize                   _plans/: which modules (_choose), how they are cut (_cuts), what becomes of
        |                         each (_maker); modules of others get a mixin or hooks (_partial, _gathered)
        v
    layers with shards            nn/: _linear, _embedding, and with shared heads or sequences _planned;
        |                         each is a ParallelLayer (_shards/_layer), whose parameters have marks
        |   groups                distributed, _groups/: the ranks of one copy, and the copies of a shard;
        |                         _guards/: until they are left, torch knows of shards or refuses them
        v
    forward, backward             _groups/_collectives: copy, reduce, scatter, gather, each with its
        |                         counterpart backward;  nn/_sequence/: the same along sequences
        |   logits                nn/_loss/: of this rank's classes; one exchange of numbers per row
        v
    clip_grad_norm_, GradScaler   _training/: norms of which each rank has a part
        v
    save_sharded, export          _state/: which part of the whole a shard is says _shards/_table, _pieces

The backend ``shard`` of a trainer (_backend, _session) does the same for a model that is split already.
"""

from typing import TYPE_CHECKING

from tp_core.internal import lazy_exports

if TYPE_CHECKING:
    from tp_shard import distributed, errors, nn, plans
    from tp_shard._backend import ShardOptions
    from tp_shard._groups._random import RandomTracker
    from tp_shard._guards._ddp import register_ddp_parameters_to_ignore
    from tp_shard._plans._parallelize import parallelize
    from tp_shard._plans._styles import Column, Experts, Gathered, Local, Replicated, Row, Sequence, Vocab
    from tp_shard._plans._summary import summary
    from tp_shard._shards._marks import _ORDER_TYPE as _ORDER_TYPE
    from tp_shard._shards._marks import _PARALLEL_ATTR as _PARALLEL_ATTR
    from tp_shard._shards._marks import _PARALLEL_DIM as _PARALLEL_DIM
    from tp_shard._shards._marks import get_parallel_dim
    from tp_shard._shards._register import register_parallel_attribute, register_parallel_dim
    from tp_shard._split import slice as slice  # not in __all__: it would shadow the builtin
    from tp_shard._state._checkpoint import load_sharded, save_sharded
    from tp_shard._state._export import export
    from tp_shard._state._optimizer_state import collect_optimizer_state_dict, relocate_optimizer_state_dict
    from tp_shard._state._pretrained import load_pretrained
    from tp_shard._state._state_dict import collect_state_dict, relocate_state_dict
    from tp_shard._training._clip import clip_grad_norm_
    from tp_shard._training._drift import check_gradients
    from tp_shard._training._optimizers import parameter_groups, update_sampled_rows
    from tp_shard._training._scaler import GradScaler
    from tp_shard._verify._report import Report, verify
    from tp_shard.errors import OutOfRangeError, VerificationError

    __version__: str

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
            "distributed": [],
            "errors": ["OutOfRangeError", "VerificationError"],
            "nn": [],
            "plans": [],
            "_backend": ["ShardOptions"],
            "_groups._random": ["RandomTracker"],
            "_guards._ddp": ["register_ddp_parameters_to_ignore"],
            "_plans._parallelize": ["parallelize"],
            "_plans._styles": [
                "Column",
                "Experts",
                "Gathered",
                "Local",
                "Replicated",
                "Row",
                "Sequence",
                "Vocab",
            ],
            "_plans._summary": ["summary"],
            "_shards._marks": ["_ORDER_TYPE", "_PARALLEL_ATTR", "_PARALLEL_DIM", "get_parallel_dim"],
            "_shards._register": ["register_parallel_attribute", "register_parallel_dim"],
            "_split": ["slice"],
            "_state._checkpoint": ["load_sharded", "save_sharded"],
            "_state._export": ["export"],
            "_state._optimizer_state": ["collect_optimizer_state_dict", "relocate_optimizer_state_dict"],
            "_state._pretrained": ["load_pretrained"],
            "_state._state_dict": ["collect_state_dict", "relocate_state_dict"],
            "_training._clip": ["clip_grad_norm_"],
            "_training._drift": ["check_gradients"],
            "_training._optimizers": ["parameter_groups", "update_sampled_rows"],
            "_training._scaler": ["GradScaler"],
            "_verify._report": ["Report", "verify"],
        },
    )
