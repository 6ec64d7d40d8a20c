"""Training and evaluation mode, module by module."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

__all__ = ["modes_kept", "tell_of_evaluation_mode"]

log = logging.getLogger("tp_trainer")


@contextmanager
def modes_kept(model: nn.Module) -> Iterator[None]:
    """Put each module back into the mode that it has now: a norm may be frozen in a model that trains."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def tell_of_evaluation_mode(model: nn.Module) -> None:
    """Warn of modules in evaluation mode within a model in training mode, which ``model.train()`` ends.

    They may be a norm that somebody froze, or a pretrained part as it was loaded: nobody can tell which.
    """
    if not model.training:
        return
    frozen = [name for name, module in model.named_modules() if not module.training]
    # Of a part that is frozen with all that it holds, the part alone.
    outermost = [name for name in frozen if name.rpartition(".")[0] not in frozen]
    if outermost:
        log.warning(
            "in evaluation mode, while fit sets the whole model to training mode: %s; to keep one out of it, "
            "call its eval() in the step or in a callback's on_fit_start, or override its train()",
            ", ".join(outermost[:3]) + ", ..." * (len(outermost) > 3),
        )
