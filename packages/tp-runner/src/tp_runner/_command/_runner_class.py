"""The runner of ``tp run``: a class that its argument names, or one that is made of a function."""

import functools
import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from tp_core.errors import ConfigError
from tp_core.messages import did_you_mean, file_meant, raised_where

from tp_runner import OrderedRunner, UnorderedRunner
from tp_runner._command._pictures import with_images


def load_runner(name: str) -> type[OrderedRunner]:
    """Return the runner class called ``module:name``, or make one of a function."""
    module_name, _, attribute = name.partition(":")
    if not attribute:
        msg = f"the runner must be given as module:Runner, got {name!r}"
        raise ConfigError(msg)
    module = _import_module(name, module_name)
    try:
        named = getattr(module, attribute)
    except AttributeError as error:
        own = [key for key, value in vars(module).items() if callable(value)]
        msg = f"no runner {name!r}: {error}{did_you_mean(attribute, own)}"
        raise ConfigError(msg) from error
    if isinstance(named, type) and issubclass(named, OrderedRunner):
        return named
    if isinstance(named, type) and issubclass(named, UnorderedRunner):
        # The journal needs results in the order of the items; the base that comes first decides it.
        return type("Run", (OrderedRunner, named), {})
    if callable(named) and not isinstance(named, type):
        work = staticmethod(lambda device, cfg, item: named(item))  # noqa: ARG005 - the runner's protocol
        return type("Run", (OrderedRunner,), {"producer_work": work})
    msg = (
        f"{name!r} is neither a runner class nor a function, but {named!r}; write a class of "
        "tp_runner.OrderedRunner with producer_work(device, cfg, data)"
    )
    raise ConfigError(msg)


def _import_module(name: str, module_name: str) -> ModuleType:
    """Import the module of a runner, which its workers import too: a file by its stem, from its folder."""
    file = Path(module_name)
    if file.suffix == ".py":
        if not file.is_file():
            msg = f"no runner {name!r}: there is no file {module_name!r}{file_meant(file)}"
            raise ConfigError(msg)
        folder = file.parent.resolve()
        importable = file.stem
    else:
        folder = Path.cwd()
        importable = module_name
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    try:
        return importlib.import_module(importable)
    except ImportError as error:
        meant = ""
        if error.name == module_name:  # and not a module that it imports
            meant = file_meant(Path(folder, f"{module_name}.py"))
        msg = f"no runner {name!r}: {error}; it is looked for from {folder}{meant}"
        raise ConfigError(msg) from error
    except Exception as error:
        msg = f"no runner {name!r}: {module_name} cannot be imported: it raised {raised_where(error)}"
        raise ConfigError(msg) from error


def image_runner(
    runner: type[OrderedRunner], *, reads: bool, folder: Path | None, batched: bool
) -> type[OrderedRunner]:
    """Return a subclass of a runner that reads pictures from files, or writes them to files."""

    def work(device: str, cfg: Any, item: Any) -> Any:
        inner = functools.partial(runner.producer_work, device, cfg)
        return with_images(inner, reads=reads, folder=folder, batched=batched)(item)

    return type("Run", (runner,), {"producer_work": staticmethod(work)})
