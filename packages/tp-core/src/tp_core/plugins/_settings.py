"""Settings of the process that decide what others compute, write or react to: read, and put back."""

import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

__all__ = ["read_settings", "restore_settings"]

_ABSENT = object()


@dataclass(frozen=True, slots=True)
class _Setting:
    """One setting.

    Attributes:
        module: The module that has it; where that is not loaded there is nothing to read.
        read: Returns its value.
        write: Sets it.
        initial: Returns the value that it has where its module has only just been loaded; ``None`` where
            that is not known.
    """

    module: str
    read: Callable[[], Any]
    write: Callable[[Any], object]
    initial: Callable[[], Any] | None = None


def read_settings() -> dict[str, Any]:
    """Return the values by what to call them; nothing is imported for it."""
    found = {name: _read(setting) for name, setting in _settings().items()}
    found["environ"] = dict(os.environ)
    return found


def restore_settings(before: Mapping[str, Any]) -> list[str]:
    """Put back what has changed since, and return what to call it."""
    changed = _restore_variables(before["environ"])
    for name, setting in _settings().items():
        now, was = _read(setting), before.get(name, _ABSENT)
        if now is _ABSENT:
            continue
        if was is _ABSENT:
            if setting.initial is None:
                continue
            was = setting.initial()
        if not _equal(now, was):
            with suppress(Exception):  # what cannot be put back is told all the same
                setting.write(was)
            changed.append(name)
    return changed


def _read(setting: _Setting) -> Any:
    if setting.module not in sys.modules:
        return _ABSENT
    try:
        return setting.read()
    except Exception:  # noqa: BLE001 - of a module that is half imported, a folder that is gone
        return _ABSENT


def _restore_variables(before: Mapping[str, str]) -> list[str]:
    now = dict(os.environ)
    changed = sorted(name for name in {*before, *now} if before.get(name) != now.get(name))
    for name in changed:
        if name in before:
            os.environ[name] = before[name]
        else:
            del os.environ[name]
    return [f"the environment variable {name}" for name in changed]


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, tuple | list) and type(one) is type(other):
        return len(one) == len(other) and all(map(_equal, one, other))
    same = one is other or one == other
    return bool(same) if isinstance(same, bool) else bool(same.all())  # arrays compare by elements


def _settings() -> dict[str, _Setting]:
    settings = {
        "the current folder": _Setting("os", os.getcwd, os.chdir),
        "garbage collection": _Setting("gc", gc.isenabled, lambda on: (gc.disable, gc.enable)[on]()),
        "sys.excepthook": _attribute("sys", "excepthook"),
        "sys.stderr": _attribute("sys", "stderr"),
        "threading.excepthook": _attribute("threading", "excepthook"),
        "the root logger": _Setting("logging", _read_root, _write_root, lambda: (30, [], 0)),
        "multiprocessing's start method": _Setting(
            "multiprocessing",
            lambda: sys.modules["multiprocessing"].get_start_method(allow_none=True),
            lambda method: sys.modules["multiprocessing"].set_start_method(method, force=True),
        ),
        "Python's random generator": _of("random", "getstate", "setstate"),
        "numpy's random generator": _of("numpy.random", "get_state", "set_state"),
        **_settings_of_torch(),
    }
    if threading.current_thread() is threading.main_thread():
        for number in ("SIGHUP", "SIGUSR1", "SIGUSR2", "SIGCHLD", "SIGPIPE", "SIGINT", "SIGTERM", "SIGALRM"):
            if hasattr(signal, number):
                settings[f"the handler of {number}"] = _handler(getattr(signal, number))
    return settings


def _settings_of_torch() -> dict[str, _Setting]:
    def torch() -> Any:
        return sys.modules["torch"]

    return {
        "torch's default type": _of(
            "torch", "get_default_dtype", "set_default_dtype", lambda: torch().float32
        ),
        "torch's default device": _Setting(
            "torch",
            lambda: torch().get_default_device(),
            lambda device: torch().set_default_device(None if device.type == "cpu" else device),
            lambda: torch().device("cpu"),
        ),
        "the mode of gradients": _of("torch", "is_grad_enabled", "set_grad_enabled", lambda: True),
        "torch's number of threads": _of("torch", "get_num_threads", "set_num_threads"),
        "torch's choice of deterministic algorithms": _of(
            "torch", "get_deterministic_debug_mode", "set_deterministic_debug_mode", lambda: 0
        ),
        "torch's random generator": _of("torch", "get_rng_state", "set_rng_state"),  # at first it is random
        "torch's process group": _Setting(
            "torch.distributed",
            lambda: torch().distributed.is_available() and torch().distributed.is_initialized(),
            lambda was: None if was else torch().distributed.destroy_process_group(),
            lambda: False,
        ),
    }


def _of(module: str, read: str, write: str, initial: Callable[[], Any] | None = None) -> _Setting:
    def get() -> Any:
        return getattr(sys.modules[module], read)()

    def put(value: Any) -> None:
        getattr(sys.modules[module], write)(value)

    return _Setting(module, get, put, initial)


def _attribute(module: str, name: str) -> _Setting:
    owner = sys.modules[module]
    return _Setting(module, lambda: getattr(owner, name), lambda value: setattr(owner, name, value))


def _handler(number: int) -> _Setting:
    return _Setting(
        "signal", lambda: signal.getsignal(number), lambda was: was is not None and signal.signal(number, was)
    )


def _read_root() -> tuple[int, list[Any], int]:
    root = sys.modules["logging"].getLogger()
    return root.level, list(root.handlers), root.manager.disable


def _write_root(was: tuple[int, list[Any], int]) -> None:
    root = sys.modules["logging"].getLogger()
    root.setLevel(was[0])
    root.handlers[:] = was[1]
    root.manager.disable = was[2]
