"""Modules of any class that get a class made of their own and one of ours, also out of a pickle."""

from typing import Any, SupportsIndex, TypeVar, cast

from torch import nn

__all__ = ["Mixin", "mix_in"]


class Mixin:
    """What is added to a module of any class, with the attributes that subclasses declare."""

    @classmethod
    def members(cls, kind: type[nn.Module]) -> dict[str, Any]:  # noqa: ARG003 - for those who need it
        """Return what else the class of both gets."""
        return {}

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        mixin, kind = type(self).__bases__
        return _rebuild, (mixin, kind), self.__dict__


Added = TypeVar("Added", bound=Mixin)
_classes: dict[tuple[type, type], type] = {}


def mix_in(mixin: type[Added], module: nn.Module, **attributes: Any) -> Added:
    """Let a module be one of a class of its own and ``mixin``, in place, with these attributes; return it."""
    module.__class__ = _mixed(mixin, type(module))
    for name, value in attributes.items():
        setattr(module, name, value)
    return cast(Added, module)


def _mixed(mixin: type[Mixin], kind: type[nn.Module]) -> type[Any]:
    if (mixin, kind) not in _classes:
        names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, **mixin.members(kind)}
        _classes[mixin, kind] = type(kind.__name__, (mixin, kind), names)
    return _classes[mixin, kind]


def _rebuild(mixin: type[Mixin], kind: type[nn.Module]) -> nn.Module:
    cls: Any = _mixed(mixin, kind)
    module: nn.Module = cls.__new__(cls)
    return module
