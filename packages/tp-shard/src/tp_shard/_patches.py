"""Which of torch's own functions are replaced, and for how long: while tensors are split over ranks.

They are replaced when model-parallel groups are formed, or when a group or a mesh of torch's is first given
to a layer, and restored when the groups are left: making a layer changes nothing for the process.
"""

from collections.abc import Callable

import torch.distributed as dist

__all__ = ["also", "install", "is_active", "remove", "replace"]

_undo: list[Callable[[], None]] = []


def install() -> None:
    """Teach DistributedDataParallel, optimizers and torch's clipping of shards; again does nothing."""
    if _undo:
        return
    from tp_shard._ddp import teach_ddp
    from tp_shard._guards import install_guards

    _undo.extend([teach_ddp(), *install_guards()])


def also(undo: Callable[[], None]) -> None:
    """Let :func:`remove` call ``undo``, too."""
    _undo.append(undo)


def remove() -> None:
    """Restore what :func:`install` replaced."""
    while _undo:
        _undo.pop()()


def is_active() -> bool:
    """Return whether there may be shards; each replacement asks.

    Whoever takes torch's own process groups down takes ours with them.
    """
    if _undo and not dist.is_initialized():
        remove()
    return bool(_undo)


def replace(owner: object, name: str, replacement: Callable[..., None]) -> Callable[[], None]:
    """Replace a function of torch's, and return what restores it.

    Whoever has replaced it after us keeps what they have; ours then hands on to the original, as it has to
    wherever :func:`is_active` is false.
    """
    original = getattr(owner, name)
    setattr(owner, name, replacement)

    def undo() -> None:
        if getattr(owner, name) is replacement:
            setattr(owner, name, original)

    return undo
