"""The watch over averaged gradients that sessions of process groups have."""

import gc
import weakref

import torch
from tp_core.sessions._reduction_watch import ReductionWatch  # private: backends alone have one


def test_a_watch_of_optimizers_that_is_never_closed_is_freed():
    """Sessions of process groups have one; torch's hook is global and would keep them for ever."""
    seen = []
    watch = ReductionWatch(seen.append, ranks=1)
    watch.listen()
    optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)])
    optimizer.step()
    assert seen == [optimizer]
    reference = weakref.ref(watch)
    del watch
    gc.collect()
    assert reference() is None
    optimizer.step()
