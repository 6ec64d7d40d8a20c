"""Packages whose names are imported when they are first used (PEP 562)."""

import builtins
import importlib
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

__all__ = ["Exports", "exports_of_stub", "lazy_exports"]


class Exports(NamedTuple):
    """What a package whose names are imported lazily defines under these names."""

    getattr: Callable[[str], Any]
    dir: Callable[[], list[str]]
    all: list[str]


def exports_of_stub(package: str) -> Exports:
    """Return the ``__getattr__``, ``__dir__`` and ``__all__`` of a package that has a stub ``__init__.pyi``.

    The stub is what type checkers read, so that each name stands in one place. Its imports are lines such as
    ``from package._module import Name as Name``. In ``__all__`` are the names that do not begin with an
    underscore, shadow a builtin or come from the package's ``compat``: constants, then classes, then others.

    Args:
        package: The package's ``__name__``.

    Example:
        >>> __getattr__, __dir__, __all__ = exports_of_stub(__name__)
    """
    found: Any = sys.modules[package].__spec__
    stub = found.loader.get_data(f"{found.submodule_search_locations[0]}/__init__.pyi")
    origins: dict[str, list[str]] = {}
    exported: list[str] = []
    for module, name in re.findall(r"^from (\S+) import (\w+) as \2$", stub.decode(), re.MULTILINE):
        if module == package:
            origins[name] = []
        else:
            origins.setdefault(module.removeprefix(f"{package}."), []).append(name)
        if module != f"{package}.compat" and not name.startswith("_") and not hasattr(builtins, name):
            exported.append(name)
    exported.sort(key=lambda name: (not name.replace("_", "").isupper(), name[0].islower(), name))
    return Exports(*lazy_exports(package, origins), exported)


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
