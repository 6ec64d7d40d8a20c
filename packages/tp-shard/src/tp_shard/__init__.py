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
        |                         (_simulate, _runs), compared step by step (_compare)
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

from tp_core.internal import exports_of_stub

__getattr__, __dir__, __all__ = exports_of_stub(__name__)
