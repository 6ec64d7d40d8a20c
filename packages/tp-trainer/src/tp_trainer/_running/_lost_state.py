"""State that a run has and its checkpoints would not: found, and pointed out."""

import functools
import logging
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.optim.swa_utils import AveragedModel

__all__ = ["unsaved_averages", "watching_optimizers"]

log = logging.getLogger("tp_trainer")


def unsaved_averages(optimizers: Iterable[Optimizer], saved: Iterable[object]) -> list[str]:
    """Return words for the averages of weights that hooks of the optimizers update and nothing saves.

    Args:
        optimizers: Those of the run.
        saved: What the run saves.
    """
    known = {id(value) for value in saved}
    known |= {id(m) for value in saved if isinstance(value, nn.Module) for m in value.modules()}
    found = {}
    for optimizer in optimizers:
        for hook in [
            *optimizer._optimizer_step_post_hooks.values(),
            *optimizer._optimizer_step_pre_hooks.values(),
        ]:
            for value in _reached(hook):
                if isinstance(value, AveragedModel) and id(value) not in known:
                    found[id(value)] = (
                        f"an {type(value).__name__} that a hook of {type(optimizer).__name__} updates"
                    )
    return list(found.values())


def _reached(hook: Callable[..., Any]) -> Iterator[Any]:
    """Yield what a function gets at without arguments: its closure, defaults, owner and globals."""
    if isinstance(hook, functools.partial):
        yield from [*hook.args, *hook.keywords.values()]
        yield from _reached(hook.func)
    elif isinstance(hook, types.MethodType):
        yield hook.__self__
        yield from _reached(hook.__func__)
    elif isinstance(hook, types.FunctionType):
        yield from hook.__defaults__ or ()
        for cell in hook.__closure__ or ():
            try:
                yield cell.cell_contents
            except ValueError:  # not bound yet
                continue
        yield from (hook.__globals__[name] for name in hook.__code__.co_names if name in hook.__globals__)


@contextmanager
def watching_optimizers(known: Iterable[Optimizer]) -> Iterator[Callable[[], None]]:
    """Note which optimizers step; the function that is yielded names those that nothing saves, once."""
    ids = {id(optimizer) for optimizer in known}
    others: dict[int, str] = {}

    def note(optimizer: Optimizer, *_: object) -> None:
        if id(optimizer) not in ids:
            others[id(optimizer)] = type(optimizer).__name__

    handle = register_optimizer_step_post_hook(note)

    def tell() -> None:
        handle.remove()
        if others:
            log.warning(
                "the checkpoint has nothing of %s, which steps in this run too: name it and its model in "
                "state={...}, or a resumed run begins with a new one",
                " and ".join(others.values()),
            )
            others.clear()

    try:
        yield tell
    finally:
        handle.remove()
