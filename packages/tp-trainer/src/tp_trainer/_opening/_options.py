"""Options of backends, as users give them: as objects, or by the backends' names."""

from collections.abc import Mapping, Sequence
from typing import Any

from tp_core.errors import ConfigError
from tp_core.plugins import NoOptions, PluginRegistry

__all__ = ["Options", "options_by_backend"]

Options = object | Sequence[object] | Mapping[str, object]
"""An object of a backend's ``options_type``, several in a list, or either by the backends' names."""


def options_by_backend(given: Options | None, plugins: PluginRegistry) -> dict[str, Any]:
    """Return the options by the names of the backends that they are for.

    Args:
        given: One object, such as ``DdpOptions(static_graph=True)``, several in a list or tuple, or a mapping
            from a backend's name to such an object or to a mapping of its fields.
        plugins: The registry with the backends.

    Raises:
        ConfigError: An object is not the options of an installed backend, or two are of one backend.
    """
    if given is None:
        return {}
    if isinstance(given, Mapping):
        return dict(given)
    known = {c.item.options_type: c.item.name for c in plugins.backends()}
    known.pop(NoOptions, None)
    options: dict[str, Any] = {}
    for value in given if isinstance(given, list | tuple) else [given]:
        name = known.get(type(value))
        if name is None:
            types = ", ".join(sorted(kind.__name__ for kind in known))
            msg = (
                f"options must be objects of {types}, the options of the installed backends, or a dict by "
                f"backends' names, got {type(value).__name__}: {value!r:.100}"
            )
            raise ConfigError(msg)
        if name in options:
            msg = f"options has two of {type(value).__name__}, both for backend {name!r}; give one"
            raise ConfigError(msg)
        options[name] = value
    return options
