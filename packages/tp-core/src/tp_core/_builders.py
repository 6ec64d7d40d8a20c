"""Functions that users name on a command line: ``model.py:build``, ``package.module:build``."""

import importlib
import importlib.util
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from tp_core.errors import ConfigError, ModelError

__all__ = ["call_builder"]


def _load_builder(name: str) -> Callable[[], Any]:
    """Return the function that ``file.py:function`` or ``package.module:function`` names.

    Raises:
        ConfigError: The file, the module or the function does not exist.
    """
    place, _, function = name.rpartition(":")
    if not place or not function.isidentifier():
        msg = f"a builder is written model.py:build or package.module:build, got {name!r}"
        raise ConfigError(msg)
    found = getattr(_module(place), function, None)
    if not callable(found):
        msg = f"{place} has no function {function!r}"
        raise ConfigError(msg)
    return found  # type: ignore[no-any-return]  # it is callable, as seen


def call_builder(name: str, keys: Collection[str]) -> dict[str, Any]:
    """Return what a builder makes, as a dict with the model as "model".

    Args:
        name: What `_load_builder` takes. The function returns a module, or a dict with one as "model".
        keys: What else the dict may have.

    Raises:
        ConfigError: There is no such function, or the dict has other keys.
        ModelError: It returns no model.
    """
    made = _load_builder(name)()
    if isinstance(made, nn.Module):
        return {"model": made}
    if not isinstance(made, Mapping) or not isinstance(made.get("model"), nn.Module):
        msg = (
            f'{name} has to return a torch.nn.Module, or a dict with one as "model"; got '
            f"{type(made).__name__}"
        )
        raise ModelError(msg)
    unknown = sorted(set(made) - set(keys))
    if unknown:
        msg = f"{name} returns {unknown} beside what is known: {', '.join(keys)}"
        raise ConfigError(msg)
    return dict(made)


def _module(place: str) -> ModuleType:
    if not place.endswith(".py"):
        try:
            return importlib.import_module(place)
        except ModuleNotFoundError as error:
            msg = f"there is no module {place!r} ({error}); a file is written with its .py: model.py:build"
            raise ConfigError(msg) from error
    path = Path(place)
    if not path.is_file():
        msg = f"there is no file {place!r}"
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
