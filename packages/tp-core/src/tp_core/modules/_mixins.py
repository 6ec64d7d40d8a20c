"""Mixins for modules of any class: the one place that gives a module another class."""

from typing import Any, SupportsIndex, TypeVar, cast

from torch import nn


class Mixin:
    """A base for mixins to a module of any class; subclasses declare their attributes."""

    @classmethod
    def members(cls, kind: type[nn.Module]) -> dict[str, Any]:  # noqa: ARG003 - for subclasses
        """Return further members of the joint class."""
        return {}

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        # By its two bases: pickle finds no generated class by name.
        mixin, kind = type(self).__bases__
        return _rebuild, (mixin, kind), self.__dict__


Added = TypeVar("Added", bound=Mixin)

# One joint class for each pair: modules of one class must keep one class.
_classes: dict[tuple[type, type], type] = {}


def mix_in(mixin: type[Added], module: nn.Module, **attributes: Any) -> Added:
    """Add ``mixin`` to the class of a module, in place, and set these attributes; return the module.

    The joint class has the name of the module's own.
    """
    # The class and not a wrapper: a new module would lose hooks, and the references that others hold. And
    # not `module.forward`, which copies of the module, such as replicas, would lack.
    module.__class__ = _mixed(mixin, type(module))
    for name, value in attributes.items():
        setattr(module, name, value)
    return cast("Added", module)


def _mixed(mixin: type[Mixin], kind: type[nn.Module]) -> type[Any]:
    if (mixin, kind) not in _classes:
        names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
        _classes[mixin, kind] = type(kind.__name__, (mixin, kind), {**names, **mixin.members(kind)})
    return _classes[mixin, kind]


def _rebuild(mixin: type[Mixin], kind: type[nn.Module]) -> nn.Module:
    cls: Any = _mixed(mixin, kind)
    module: nn.Module = cls.__new__(cls)
    return module
