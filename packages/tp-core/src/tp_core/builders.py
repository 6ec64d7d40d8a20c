"""Functions that users name on a command line: ``model.py:build``, ``package.module:build``."""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from tp_core.errors import ConfigError, ModelError, TpError
from tp_core.messages import did_you_mean, file_meant, raised_where

__all__ = ["call_builder", "load_function"]


def load_function(name: str, *, example: str = "build") -> Callable[..., Any]:
    """Return the function that ``file.py:function`` or ``package.module:function`` names.

    Raises:
        ConfigError: The file, the module or the function does not exist, or importing it raises.
    """
    place, _, function = name.rpartition(":")
    if not place or not function.isidentifier():
        msg = f"a function is written file.py:{example} or package.module:{example}, got {name!r}"
        raise ConfigError(msg)
    module = _module(place)
    builder = getattr(module, function, None)
    if not callable(builder):
        if hasattr(module, function):
            kind = type(builder).__name__
            msg = (
                f"{function!r} in {place} is a {kind}, and no function; write a function that returns it: "
                f"def {example}(): return {function}"
            )
            raise ConfigError(msg)
        own = [name for name, value in vars(module).items() if callable(value)]
        msg = f"{place} has no function {function!r}{did_you_mean(function, own)}"
        raise ConfigError(msg)
    return builder  # type: ignore[no-any-return]  # it is callable, as seen


def call_builder(name: str, keys: Collection[str]) -> dict[str, Any]:
    """Return what a builder makes, as a dict with the model as "model".

    Args:
        name: A function without arguments, written ``file.py:function`` or ``package.module:function``. It
            returns a module, or a dict with one as "model".
        keys: What else the dict may have.

    Raises:
        ConfigError: There is no such function, or the dict has other keys.
        ModelError: The builder returns no model, or raises: the message says where.
    """
    build = load_function(name)
    needed = [
        parameter.name
        for parameter in _parameters(build)
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if needed:
        msg = f"{name} takes {', '.join(needed)}, and a builder is called without arguments; give it defaults"
        raise ConfigError(msg)
    try:
        built = build()
    except TpError:
        raise
    except Exception as error:
        msg = f"{name} raised {raised_where(error)}"
        raise ModelError(msg) from error
    if isinstance(built, nn.Module):
        return {"model": built}
    if not isinstance(built, Mapping) or not isinstance(built.get("model"), nn.Module):
        msg = (
            f'{name} has to return a torch.nn.Module, or a dict with one as "model"; got '
            f"{type(built).__name__}"
        )
        raise ModelError(msg)
    unknown = sorted(set(built) - set(keys))
    if unknown:
        msg = f"{name} returns {unknown} beside what is known: {', '.join(keys)}"
        raise ConfigError(msg)
    return dict(built)


def _parameters(function: Callable[..., Any]) -> Collection[inspect.Parameter]:
    try:
        return inspect.signature(function).parameters.values()
    except ValueError:  # some that are not written in Python have no signature
        return ()


def _module(place: str) -> ModuleType:
    try:
        return _imported(place)
    except TpError:
        raise
    except Exception as error:
        msg = f"{place} cannot be imported: it raised {raised_where(error)}"
        raise ConfigError(msg) from error


def _imported(place: str) -> ModuleType:
    if not place.endswith(".py"):
        try:
            if (folder := str(Path.cwd())) not in sys.path:  # as python -m does, and no installed command
                sys.path.insert(0, folder)
            return importlib.import_module(place)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{place}.".startswith(f"{error.name}."):
                raise  # it is there, and imports what is not
            file = Path(f"{place.rstrip('/')}.py")
            if file.is_file():
                hint = f"; a file is written with its .py: {file}"
            else:
                hint = file_meant(file)
            msg = f"there is no module {place!r}, neither in {folder} nor among the installed ones{hint}"
            raise ConfigError(msg) from error
    path = Path(place)
    if not path.is_file():
        msg = f"there is no file {place!r}{file_meant(path)}"
        raise ConfigError(msg)
    sys.path.insert(0, str(path.parent.resolve()))  # for what it imports from beside it
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        msg = f"{place!r} is not a Python file"
        raise ConfigError(msg)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module
