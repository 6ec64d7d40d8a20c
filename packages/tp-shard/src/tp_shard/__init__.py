"""Tensor parallelism with plain tensors: parallel layers, loss and sharded state.

Example:
    >>> layer = ts.nn.ParallelLinear(20, 30, dim=-1)  # of one rank; from the same seed torch's own
    >>> layer(torch.ones(8, 20)).shape
    torch.Size([8, 30])

The steps from a finished model to a split and trained one, and the files of each step::

    plans.auto, plans.from_hf     _search/: run it and find which layers feed which (_trace), try styles on
    its
        |                         blocks (_variants), keep the proven ones (_prove)
        |   a plan                _plans/_styles: {"name": Column(), ...}
        v
    verify                        _verify/: the whole model beside the split one, on ranks that are threads
        |                         (_simulate), compared step by step (_report)
        v
    parallelize                   _plans/: the modules of a plan, their splits and their new layers (_maker);
        |                         modules of users get a mixin or hooks (_modules)
        v
    layers with shards            nn/: _layers, and with shared heads or sequences _planned; each is a
        |                         ParallelLayer (_shards), with marks on its parameters
        |   groups                distributed, _groups/: the ranks of one copy, and the copies of a shard;
        |                         _guards: while there are groups, torch handles shards or refuses them
        v
    forward, backward             _groups/_collectives: copy, reduce, scatter, gather, each with its backward
        |                         collective;  nn/_sequence: the same along sequences
        |   logits                nn/_class_shards: of this rank's classes; one exchange of numbers per row
        v
    clip_grad_norm_, GradScaler   _training: norms from the parts of all ranks
        v
    save_sharded, export          _files; the place of a shard in the whole tensor: _shards

The backend ``shard`` of a trainer (_backend, _session) does the same for a model that is already split, and
compares what a step returns on the ranks of a copy (_step_outputs).
"""

from typing import TYPE_CHECKING

from tp_core.plugins import lazy_exports

if TYPE_CHECKING:
    from tp_shard import compat as compat
    from tp_shard import distributed as distributed
    from tp_shard import errors as errors
    from tp_shard import nn as nn
    from tp_shard import plans as plans
    from tp_shard._backend import ShardOptions as ShardOptions
    from tp_shard._files import export as export
    from tp_shard._files import load_pretrained as load_pretrained
    from tp_shard._files import load_sharded as load_sharded
    from tp_shard._files import save_sharded as save_sharded
    from tp_shard._groups._random import RandomTracker as RandomTracker
    from tp_shard._plans._parallelize import parallelize as parallelize
    from tp_shard._plans._styles import Column as Column
    from tp_shard._plans._styles import Experts as Experts
    from tp_shard._plans._styles import Gathered as Gathered
    from tp_shard._plans._styles import Local as Local
    from tp_shard._plans._styles import Replicated as Replicated
    from tp_shard._plans._styles import Row as Row
    from tp_shard._plans._styles import Sequence as Sequence
    from tp_shard._plans._styles import Vocab as Vocab
    from tp_shard._plans._summary import summary as summary
    from tp_shard._shards import get_parallel_dim as get_parallel_dim
    from tp_shard._shards import register_parallel_attribute as register_parallel_attribute
    from tp_shard._shards import register_parallel_dim as register_parallel_dim
    from tp_shard._state_dict import collect_optimizer_state_dict as collect_optimizer_state_dict
    from tp_shard._state_dict import collect_state_dict as collect_state_dict
    from tp_shard._state_dict import (
        relocate_optimizer_state_dict as relocate_optimizer_state_dict,
    )
    from tp_shard._state_dict import relocate_state_dict as relocate_state_dict
    from tp_shard._training import GradScaler as GradScaler
    from tp_shard._training import check_gradients as check_gradients
    from tp_shard._training import clip_grad_norm_ as clip_grad_norm_
    from tp_shard._training import parameter_groups as parameter_groups
    from tp_shard._training import update_sampled_rows as update_sampled_rows
    from tp_shard._verify._report import verify as verify
    from tp_shard.compat import _ORDER_ATTR as _ORDER_ATTR
    from tp_shard.compat import _ORDER_TYPE as _ORDER_TYPE
    from tp_shard.compat import _PARALLEL_ATTR as _PARALLEL_ATTR
    from tp_shard.compat import _PARALLEL_DIM as _PARALLEL_DIM
    from tp_shard.compat import register_ddp_parameters_to_ignore as register_ddp_parameters_to_ignore
    from tp_shard.compat import slice as slice
    from tp_shard.errors import OutOfRangeError as OutOfRangeError
    from tp_shard.errors import VerificationError as VerificationError

    __version__: str
else:
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        {
            "tp_shard": ["compat", "distributed", "errors", "nn", "plans"],
            "tp_shard._backend": ["ShardOptions"],
            "tp_shard._groups._random": ["RandomTracker"],
            "tp_shard._plans._parallelize": ["parallelize"],
            "tp_shard._plans._styles": [
                "Column",
                "Experts",
                "Gathered",
                "Local",
                "Replicated",
                "Row",
                "Sequence",
                "Vocab",
            ],
            "tp_shard._plans._summary": ["summary"],
            "tp_shard._shards": ["get_parallel_dim", "register_parallel_attribute", "register_parallel_dim"],
            "tp_shard._files": ["export", "load_pretrained", "load_sharded", "save_sharded"],
            "tp_shard._state_dict": [
                "collect_optimizer_state_dict",
                "collect_state_dict",
                "relocate_optimizer_state_dict",
                "relocate_state_dict",
            ],
            "tp_shard._training": [
                "GradScaler",
                "check_gradients",
                "clip_grad_norm_",
                "parameter_groups",
                "update_sampled_rows",
            ],
            "tp_shard._verify._report": ["verify"],
            "tp_shard.compat": [
                "_ORDER_ATTR",
                "_ORDER_TYPE",
                "_PARALLEL_ATTR",
                "_PARALLEL_DIM",
                "register_ddp_parameters_to_ignore",
                "slice",
            ],
            "tp_shard.errors": ["OutOfRangeError", "VerificationError"],
        },
    )
