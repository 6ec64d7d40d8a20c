"""Checking the options of an engine, so that none is misspelt, misused or ignored."""

import logging
import math
from collections.abc import Mapping
from typing import Any

from tp_core.errors import ConfigError

from tp_runner._batching import Batching
from tp_runner._launch import START_METHODS
from tp_runner._settings import Settings
from tp_runner._surroundings import share_of_cores

__all__ = ["OPTIONS", "make_settings"]

OPTIONS = (
    "batch",
    "collate",
    "log_level",
    "max_bytes",
    "max_wait_s",
    "on_error",
    "ordered",
    "queue_scale",
    "resources",
    "restart",
    "retries",
    "start_method",
    "threads",
    "timeline",
    "timeout_s",
)

_UNFIT = {
    "process": {"resources": "only Ray places workers by them"},
    "thread": {
        "log_level": "records of threads are the parent's own",
        "resources": "only Ray places workers by them",
        "restart": "threads do not die",
        "start_method": "threads are not started by one",
        "threads": "they all share the process's own setting",
        "timeout_s": "a thread cannot be stopped",
    },
    "inline": {
        "log_level": "there is no worker",
        "max_wait_s": "the input is read in the caller's thread",
        "resources": "only Ray places workers by them",
        "restart": "there is no worker",
        "start_method": "there is no worker",
        "threads": "there is no worker",
        "timeout_s": "the caller's own thread cannot be stopped",
    },
    "ray": {
        "start_method": "Ray starts the workers",
    },
}


def make_settings(engine: str, n_workers: int, options: Mapping[str, Any]) -> Settings:
    """Check options that were given by name; fill in the rest.

    Raises:
        ConfigError: An option is unknown, has a wrong value, or means nothing to this engine.
    """
    for name, value in options.items():
        if name not in OPTIONS:
            msg = f"unknown option {name!r} of engine {engine!r}; there are: {', '.join(OPTIONS)}"
            raise ConfigError(msg)
        reason = _UNFIT.get(engine, {}).get(name)
        if reason is not None and value is not None and value != 0:
            msg = f"engine {engine!r} has no use for {name}={value!r}: {reason}"
            raise ConfigError(msg)
    given = {name: value for name, value in options.items() if value is not None}
    batching = _batching(given)
    values: dict[str, Any] = {
        "threads": share_of_cores(n_workers),
        "log_level": logging.getLogger().getEffectiveLevel(),
        **given,
    }
    _check_choice(values, "start_method", START_METHODS)
    _check_choice(values, "on_error", ("raise", "return"))
    for name in ("retries", "restart"):
        _check_whole(values, name, 0)
    for name in ("threads", "max_bytes"):
        _check_whole(values, name, 1)
    for name in ("timeout_s", "max_wait_s", "queue_scale"):
        _check_positive(values, name)
    values["log_level"] = _log_level(values["log_level"])
    _check_resources(given.get("resources", {}))
    return Settings(**values, batching=batching)


def _batching(given: dict[str, Any]) -> Batching | None:
    size, collate = given.pop("batch", None), given.pop("collate", None)
    if size is None:
        for name, value in (("collate", collate), ("max_wait_s", given.get("max_wait_s"))):
            if value is not None:
                msg = f"{name} is about batches; give batch= too, how many items make one"
                raise ConfigError(msg)
        return None
    _check_whole({"batch": size}, "batch", 1)
    if collate is not None and not callable(collate):
        msg = f"collate must be a function of a list of items, got {collate!r}"
        raise ConfigError(msg)
    return Batching(size, collate)


def _check_choice(values: Mapping[str, Any], name: str, choices: tuple[str, ...]) -> None:
    if name in values and values[name] not in choices:
        msg = f"{name} must be one of {', '.join(map(repr, choices))}, got {values[name]!r}"
        raise ConfigError(msg)


def _check_whole(values: Mapping[str, Any], name: str, least: int) -> None:
    value = values.get(name, least)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        msg = f"{name} must be a whole number of at least {least}, got {value!r}"
        raise ConfigError(msg)


def _check_positive(values: Mapping[str, Any], name: str) -> None:
    value = values.get(name, 1.0)
    if not isinstance(value, int | float) or not value > 0 or math.isinf(value):
        msg = f"{name} must be a positive number, got {value!r}"
        raise ConfigError(msg)


def _log_level(value: Any) -> int:
    levels = logging.getLevelNamesMapping()
    if isinstance(value, str) and value in levels:
        return levels[value]
    if not isinstance(value, int) or isinstance(value, bool):
        msg = f"log_level must be a level of logging such as logging.INFO or 'INFO', got {value!r}"
        raise ConfigError(msg)
    return value


def _check_resources(value: Any) -> None:
    good = isinstance(value, Mapping) and all(
        isinstance(name, str) and isinstance(n, int | float) and not isinstance(n, bool) and 0 <= n < math.inf
        for name, n in value.items()
    )
    if not good:
        msg = (
            "resources must say how much of each resource one worker takes, such as "
            f"{{'num_cpus': 2, 'num_gpus': 0.5}}, got {value!r}"
        )
        raise ConfigError(msg)
