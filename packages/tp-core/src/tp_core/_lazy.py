"""Packages whose names are imported when they are first used (PEP 562)."""

import builtins
import importlib
import re
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

__all__ = ["Exports", "exports_of_stub"]


class Exports(NamedTuple):
    """What a package whose names are imported lazily defines under these names."""

    getattr: Callable[[str], Any]
    dir: Callable[[], list[str]]
    all: list[str]


def exports_of_stub(package: str) -> Exports:
    """Return the ``__getattr__``, ``__dir__`` and ``__all__`` of a package that has a stub ``__init__.pyi``.

    A plugin's entry point names a module of its package, so finding plugins imports the package: it has to
    be cheap. The stub is what type checkers read, so that each name stands in one place. Its imports are
    lines such as ``from package._module import Name as Name``. In ``__all__`` are the names that do not begin
    with an underscore, shadow a builtin or come from the package's ``compat``: constants, then classes, then
    others. The package's ``__version__`` is that of its distribution, whose name has hyphens for underscores.

    Args:
        package: The package's ``__name__``.

    Example:
        >>> __getattr__, __dir__, __all__ = exports_of_stub(__name__)
    """
    found: Any = sys.modules[package].__spec__
    stub = found.loader.get_data(f"{found.submodule_search_locations[0]}/__init__.pyi")
    imports = re.findall(r"^from (\S+) import (\w+) as \2$", stub.decode(), re.MULTILINE)
    modules = {name: module for module, name in imports}
    exported = [
        name
        for module, name in imports
        if module != f"{package}.compat" and not name.startswith("_") and not hasattr(builtins, name)
    ]
    exported.sort(key=lambda name: (not name.replace("_", "").isupper(), name[0].islower(), name))

    def __getattr__(name: str) -> Any:
        if name == "__version__":
            return _version_of(package)
        if name not in modules:
            msg = f"module {package!r} has no attribute {name!r}"
            raise AttributeError(msg)
        module = modules[name]
        if module == package:
            return importlib.import_module(f"{package}.{name}")  # which makes it an attribute of the package
        value = getattr(importlib.import_module(module), name)
        setattr(sys.modules[package], name, value)
        return value

    def __dir__() -> list[str]:
        return sorted({*vars(sys.modules[package]), *modules})

    return Exports(__getattr__, __dir__, exported)


def _version_of(package: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package.replace("_", "-"))
    except PackageNotFoundError as error:
        msg = f"module {package!r} has no attribute '__version__': its distribution is not installed"
        raise AttributeError(msg) from error
