"""Lazy packages, which import a name when it is first used (PEP 562)."""

import builtins
import gc
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any


def lazy_exports(
    package: str, names: Mapping[str, Sequence[str]], *, answers: str | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return the ``__getattr__``, ``__dir__`` and ``__all__`` of a package with names imported late.

    A plugin's entry point names a module of its package, so finding plugins imports the package: it has to
    be cheap. Type checkers do not follow such a table; what they read is the same names as imports, under
    ``TYPE_CHECKING``. In ``__all__`` are the names that do not begin with an underscore, shadow a builtin or
    come from the package's ``compat``: constants, then classes, then others. The package's ``__version__`` is
    its distribution's, which has hyphens for underscores in its name.

    Args:
        package: The package's ``__name__``.
        names: The names that the package exports, by the modules that they are imported from.
        answers: A module with a dict ``NAMES``: for names of other libraries what to write here.

    Example:
        >>> __getattr__, __dir__, __all__ = lazy_exports(__name__, {"tp_core.errors": ["TpError"]})
    """
    modules = {name: module for module in names for name in names[module]}
    exported = [
        name
        for name, module in modules.items()
        if module != f"{package}.compat" and not name.startswith("_") and not hasattr(builtins, name)
    ]
    exported.sort(key=lambda name: (not name.replace("_", "").isupper(), name[0].islower(), name))

    def advice(name: str) -> str:
        public = [f"{package}.{key}" for key, module in modules.items() if module == package]
        homes = [home for home in public if hasattr(importlib.import_module(home), name)]
        if homes:
            return f"; it is in {homes[0]}"
        if answers is None:
            peers = {}
        else:
            peers = importlib.import_module(answers).NAMES
        if name in peers:
            return f"; write {peers[name]}"
        if public:
            return f"; look in {', '.join(public)}"
        return ""

    def __getattr__(name: str) -> Any:
        if name == "__version__":
            return _version_of(package)
        if name not in modules:
            msg = f"module {package!r} has no attribute {name!r}"
            # Imports for a user's typo alone: tools that probe a module ask for private names.
            if not name.startswith("_"):
                msg += advice(name)
            raise AttributeError(msg, name=name, obj=sys.modules[package])  # Python adds the nearest name
        module = modules[name]
        if module == package:
            return importlib.import_module(f"{package}.{name}")  # which makes it an attribute of the package
        with _garbage_left():
            value = getattr(importlib.import_module(module), name)
        setattr(sys.modules[package], name, value)
        return value

    _advice[package] = advice

    def __dir__() -> list[str]:
        return sorted({*vars(sys.modules[package]), *modules})

    return __getattr__, __dir__, exported


_advice: dict[str, Callable[[str], str]] = {}
"""What to write for a name that a package lacks, by package."""


class _MissingNames:
    """Answers ``from package import name`` for a name that a package lacks; the last finder of modules.

    Python has a sentence of its own for that, "cannot import name", in which the one of ``__getattr__`` is
    lost. Before that it looks for a module of this name.
    """

    @staticmethod
    def find_spec(fullname: str, _path: object = None, _target: object = None) -> None:
        package, _, name = fullname.rpartition(".")
        if package not in _advice or name.startswith("_"):
            return
        from difflib import get_close_matches  # for messages alone: every worker process would wait for it

        near = get_close_matches(name, getattr(sys.modules[package], "__all__", ()), n=1)
        advice = _advice[package](name)
        if near and "; write" not in advice:
            advice = f"; did you mean {near[0]!r}?"
        msg = f"cannot import name {name!r} from {package!r}{advice}"
        raise ModuleNotFoundError(msg, name=package)  # of another name than the module's, which Python hides


sys.meta_path.append(_MissingNames)


@contextmanager
def _garbage_left() -> Iterator[None]:
    """Let the garbage collector rest, if it works.

    What modules define makes no garbage, and is so much that the collector would look at every object of the
    process: in one that has imported torch this takes longer than the modules.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _version_of(package: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package.replace("_", "-"))
    except PackageNotFoundError as error:
        msg = f"module {package!r} has no attribute '__version__': its distribution is not installed"
        raise AttributeError(msg) from error
