"""What the installed plugins bring, by its name, and what the installed torch lacks."""

import inspect

import pytest
from torch.utils.checkpoint import checkpoint
from tp_core.plugins import registry

__all__ = ["adapter_class", "backend_class", "needs_failed_checkpoints_to_end"]

needs_failed_checkpoints_to_end = pytest.mark.skipif(
    "gen.throw(" not in inspect.getsource(checkpoint),
    reason="torch 2.11 leaves the hooks of a checkpoint whose call raises, and takes another thread's away",
)


def backend_class(name):
    (found,) = [type(c.item) for c in registry.backends() if c.item.name == name]
    return found


def adapter_class(name):
    (found,) = [type(c.item) for c in registry.collate_adapters() if c.item.name == name]
    return found
