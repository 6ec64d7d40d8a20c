"""The functions of torch that are replaced while tensors are split over ranks.

They are replaced when model-parallel groups are formed, or when a layer is first given a group or mesh of
torch. They are restored when the groups are destroyed. Making a layer on one rank replaces nothing. A module
registers its replacements with :func:`while_split`; see :mod:`tp_shard._guards`.
"""

from collections.abc import Callable, Iterable

import torch.distributed as dist

Undo = Callable[[], None]

_installers: list[Callable[[], Iterable[Undo]]] = []
_undo: list[Undo] = []


def while_split(installer: Callable[[], Iterable[Undo]]) -> Callable[[], Iterable[Undo]]:
    """Call ``installer`` when the first group is formed, and what it returns when the groups end."""
    _installers.append(installer)
    return installer


def install() -> None:
    """Call all installers of :func:`while_split`; a second call does nothing."""
    if not _undo:
        for installer in _installers:
            _undo.extend(installer())


def also(undo: Undo) -> None:
    _undo.append(undo)


def remove() -> None:
    while _undo:  # last in, first out: a function replaced twice gets its original back
        _undo.pop()()


def is_active() -> bool:
    """Return whether there may be shards; each replacement asks before it does more than the original.

    Destroying torch's default process group ends ours too, so the replacements are removed then.
    """
    if _undo and not dist.is_initialized():
        remove()
    return bool(_undo)


def replace(owner: object, name: str, replacement: Callable[..., None]) -> Undo:
    """Replace a function of torch, and return a function that restores it.

    A replacement must call the original wherever :func:`is_active` is false.
    """
    original = getattr(owner, name)
    setattr(owner, name, replacement)

    def undo() -> None:
        # Another library may have wrapped ours since: restoring the original would drop its wrapper.
        if getattr(owner, name) is replacement:
            setattr(owner, name, original)

    return undo
