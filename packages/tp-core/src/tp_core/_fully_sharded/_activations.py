"""Units that keep their input alone, and are computed again in the backward pass."""

from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

__all__ = ["checkpoint_activations"]


def checkpoint_activations(module: nn.Module) -> None:
    """Compute a module again in the backward pass, in place of keeping what it needs.

    The module keeps its names and its class; its forward pass alone is another one. torch's own wrapper
    would put a part of its own into every name.
    """
    forward = module.forward

    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    module.forward = checkpointed
