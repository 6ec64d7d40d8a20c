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
    it has to be cheap. Type checkers look at imports under ``TYPE_CHECKING`` beside the call. The
    package's ``__version__`` is that of its distribution, whose name has hyphens for underscores.

    Args:
        package: The package's ``__name__``.
        origins: The names that each of its modules defines, by the module's own name; one with a
            dot before it is a module of the parent, as in relative imports. Modules whose names
            are public are exported themselves, too.

    Example:
        >>> __getattr__, __dir__ = lazy_exports(__name__, {"_tree": ["tree_map"]})
    """
    modules = {module: (module, False) for module in origins if not module.startswith(("_", "."))}
    modules |= {name: (module, True) for module, names in origins.items() for name in names}

    def __getattr__(name: str) -> Any:
        if name == "__version__":
            return _version_of(package)
        if name not in modules:
            msg = f"module {package!r} has no attribute {name!r}"
            raise AttributeError(msg)
        module, is_member = modules[name]
        value = importlib.import_module(f".{module}", package)
        if is_member:
            value = getattr(value, name)
        setattr(sys.modules[package], name, value)
        return value

    def __dir__() -> list[str]:
        return sorted({*vars(sys.modules[package]), *modules})

    return __getattr__, __dir__


def _version_of(package: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package.replace("_", "-"))
    except PackageNotFoundError as error:
        msg = f"module {package!r} has no attribute '__version__': its distribution is not installed"
        raise AttributeError(msg) from error
