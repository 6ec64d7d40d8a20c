"""What the installed plugins bring, by its name."""

from tp_core.plugins import registry

__all__ = ["adapter_class", "backend_class"]


def backend_class(name):
    (found,) = [type(c.item) for c in registry.backends() if c.item.name == name]
    return found


def adapter_class(name):
    (found,) = [type(c.item) for c in registry.collate_adapters() if c.item.name == name]
    return found
