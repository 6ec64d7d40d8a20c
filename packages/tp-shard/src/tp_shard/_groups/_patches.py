"""Which of torch's own functions are replaced, and for how long: while tensors are split over ranks.

They are replaced when model-parallel groups are formed, or when a group or a mesh of torch's is first given
to a layer, and restored when the groups are left: making a layer changes nothing for the process. Whoever
has something to replace says so with :func:`while_split`; see :mod:`tp_shard._guards`.
"""

from collections.abc import Callable, Iterable

import torch.distributed as dist

Undo = Callable[[], None]

_installers: list[Callable[[], Iterable[Undo]]] = []
_undo: list[Undo] = []


def while_split(installer: Callable[[], Iterable[Undo]]) -> Callable[[], Iterable[Undo]]:
    """Call ``installer`` when tensors begin to be split, and what it returns when that ends."""
    _installers.append(installer)
    return installer


def install() -> None:
    """Replace all that was noted by :func:`while_split`; a second call does nothing."""
    if not _undo:
        for installer in _installers:
            _undo.extend(installer())


def also(undo: Undo) -> None:
    """Let :func:`remove` call ``undo``, too."""
    _undo.append(undo)


def remove() -> None:
    """Restore what :func:`install` replaced."""
    while _undo:  # last in, first out: a function replaced twice gets its original back
        _undo.pop()()


def is_active() -> bool:
    """Return whether there may be shards; each replacement asks.

    Whoever takes torch's own process groups down takes ours with them.
    """
    if _undo and not dist.is_initialized():
        remove()
    return bool(_undo)


def replace(owner: object, name: str, replacement: Callable[..., None]) -> Undo:
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
