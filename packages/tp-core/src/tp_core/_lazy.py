"""Packages whose names are imported when they are first used (PEP 562)."""

import importlib
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

__all__ = ["lazy_exports"]


def lazy_exports(
    package: str, origins: Mapping[str, Iterable[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the ``__getattr__`` and ``__dir__`` of a package that imports its names lazily.

    A plugin's entry point names a module of its package, so finding plugins imports the package:
    it has to be cheap. Type checkers look at imports under ``TYPE_CHECKING`` beside the call.

    Args:
        package: The package's ``__name__``.
        origins: The names that each of its modules defines, by the module's own name. An empty
            iterable exports the module itself.

    Example:
        >>> __getattr__, __dir__ = lazy_exports(__name__, {"_tree": ["tree_map"]})
    """
    modules = {
        name: (module, name in names)
        for module, names in ((m, tuple(n)) for m, n in origins.items())
        for name in (names or (module,))
    }

    def __getattr__(name: str) -> Any:  # noqa: N807 - it becomes the package's
        if name not in modules:
            msg = f"module {package!r} has no attribute {name!r}"
            raise AttributeError(msg)
        module, is_member = modules[name]
        value = importlib.import_module(f"{package}.{module}")
        if is_member:
            value = getattr(value, name)
        setattr(sys.modules[package], name, value)
        return value

    def __dir__() -> list[str]:  # noqa: N807 - it becomes the package's
        return sorted({*vars(sys.modules[package]), *modules})

    return __getattr__, __dir__
