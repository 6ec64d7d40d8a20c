"""Generators of random numbers that work refers to: workers have copies, which repeat each other."""

import contextlib
import dis
import functools
import os
import random
import sys
import types
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

__all__ = ["warn_of_copied_generators"]

_MOST = 50  # so many functions are looked into: no start of workers must wait for long
_STANDARD = os.path.dirname(os.__file__)  # noqa: PTH120 - it is compared as text


def warn_of_copied_generators(works: Iterable[Any], cfg: Any = None, *, stacklevel: int) -> None:
    """Warn once of generators that every worker would have a copy of, such as one at module level.

    Args:
        works: The functions and objects that workers call.
        cfg: What they find their values in, as attributes or keys.
        stacklevel: As for ``warnings.warn``, from the caller on.
    """
    found = _Search(works, cfg).found
    if found:
        warnings.warn(
            f"the work draws from {', '.join(sorted(found))}: each worker process has a copy, and the copies "
            "give the same numbers; draw from tp_runner.item().rng instead",
            RuntimeWarning,
            stacklevel=stacklevel + 1,
        )


class _Search:
    def __init__(self, works: Iterable[Any], cfg: Any) -> None:
        self.found: set[str] = set()
        self._seen: set[types.FunctionType] = set()
        self._names: set[str] = set()
        # The global generators are each worker's own, and what asks the system has no state to copy.
        self._kinds: tuple[type, ...] = (random.Random,)
        self._spared = [getattr(random, "_inst", None)]
        numpy: Any = sys.modules.get("numpy.random")
        torch: Any = sys.modules.get("torch")
        if hasattr(numpy, "Generator"):  # or it is in the middle of being imported
            self._kinds += (numpy.Generator, numpy.RandomState)
            self._spared.append(getattr(numpy.mtrand, "_rand", None))
        if hasattr(torch, "default_generator"):
            self._kinds += (torch.Generator,)
            self._spared.append(torch.default_generator)
        for work in works:
            self._look(getattr(work, "__name__", type(work).__name__), work, is_work=True)
        of_cfg = cfg if isinstance(cfg, Mapping) else _attributes(cfg)
        for name in self._names & of_cfg.keys():
            self._look(f"cfg.{name}", of_cfg[name])

    def _look(self, name: str, value: Any, *, is_work: bool = False) -> None:
        """Look at what is called ``name``, and at what it refers to."""
        kind = type(value)  # isinstance would ask proxies, which may raise
        if issubclass(kind, types.BuiltinMethodType):  # draw = rng.random
            value, kind = value.__self__, type(value.__self__)
        if issubclass(kind, self._kinds):
            if not issubclass(kind, random.SystemRandom) and not any(value is one for one in self._spared):
                self.found.add(repr(name))
        elif issubclass(kind, types.FunctionType):
            if value not in self._seen and len(self._seen) < _MOST and (is_work or not _is_installed(value)):
                self._seen.add(value)
                self._names.update(*(code.co_names for code in _codes(value.__code__)))
                for other, of in _references(value):
                    self._look(other, of)
        elif issubclass(kind, functools.partial):
            for of in (value.func, *value.args, *value.keywords.values()):
                self._look(name, of, is_work=is_work)
        elif issubclass(kind, types.MethodType):
            self._look(name, value.__func__, is_work=is_work)
            self._look(name, value.__self__)
        elif not issubclass(kind, type | types.ModuleType):
            for other, of in _attributes(value).items():
                if issubclass(type(of), self._kinds):
                    self._look(f"{name}.{other}", of)
            if callable(value) and issubclass(type(kind.__call__), types.FunctionType):
                self._look(name, kind.__call__)


def _references(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield what a function finds by name: globals, what modules among them have, closures, defaults."""
    for code in _codes(function.__code__):
        # Its names are those of attributes, too: only an instruction says that one is a global's.
        for name in {one.argval for one in dis.get_instructions(code) if one.opname == "LOAD_GLOBAL"}:
            value = function.__globals__.get(name)
            yield name, value
            if issubclass(type(value), types.ModuleType):
                for attribute in vars(value).keys() & code.co_names:
                    yield f"{name}.{attribute}", vars(value)[attribute]
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # there is nothing in it yet
            yield name, cell.cell_contents
    yield from (function.__kwdefaults__ or {}).items()
    for value in function.__defaults__ or ():
        yield "a default argument", value


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield the code of a function and of those inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _attributes(value: Any) -> Mapping[str, Any]:
    try:
        return dict(vars(value))
    except Exception:  # noqa: BLE001 - it has none, or is a proxy of what is not there
        return {}


def _is_installed(function: types.FunctionType) -> bool:
    """Whether it is of the standard library or an installed package, whose state is its own affair."""
    file = function.__code__.co_filename
    return "site-packages" in file or file.startswith((_STANDARD, "<frozen"))
