"""The arguments of a runner, checked: devices, cores, batches, and options by name."""

import functools
import logging
import math
import os
import pickle
import sys
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Self, TypedDict

from tp_core.errors import ConfigError, DeviceError
from tp_core.launching import available_cores
from tp_core.ranks import dumps_by_value

# -- Devices and cores; CPU workers need no torch -----------------------------------------------


def devices_of_workers(
    devices: Any, *, n_workers: int | None = None, elsewhere: bool = False
) -> tuple[str, ...]:
    """Return one device for each worker.

    Args:
        devices: A number of CPU workers; ``None`` for one on each core; a device or a sequence of
            them; ``"auto"`` for whatever accelerators there are.
        n_workers: A number of CPU workers, in place of ``devices``.
        elsewhere: Whether the workers are on other machines, with devices that are not visible here.
    """
    if n_workers is not None:
        if devices is not None:
            msg = (
                f"n_workers={n_workers!r} is a number of CPU workers and devices={devices!r} names "
                "devices; give one of them"
            )
            raise DeviceError(msg)
        return ("cpu",) * _check_count("n_workers", n_workers)
    if devices is None:
        return ("cpu",) * available_cores()
    if isinstance(devices, int) and not isinstance(devices, bool):
        return ("cpu",) * _check_count("devices as a number of CPU workers", devices)
    if isinstance(devices, str) and devices.isdigit():
        msg = (
            f"devices={devices!r} could be CPU workers or accelerators; give n_workers={devices} for "
            f"CPU workers, or the devices themselves, such as ['cuda:0', 'cuda:1']"
        )
        raise DeviceError(msg)
    if devices == "cpu":
        return ("cpu",)
    if isinstance(devices, Sequence) and not isinstance(devices, str):
        if not devices:
            msg = "devices is an empty sequence; give at least one, such as devices=['cpu']"
            raise DeviceError(msg)
        if all(isinstance(device, str) and device == "cpu" for device in devices):
            return tuple(devices)
        if elsewhere:
            import torch

            return tuple(str(torch.device(device)) for device in devices)
    from tp_core import resolve_devices

    return tuple(str(device) for device in resolve_devices(devices))


def _check_count(name: str, count: Any) -> int:
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        msg = f"{name} must be a whole number of at least 1, got {count!r}"
        raise DeviceError(msg)
    return count


def cores_of_workers(cpus: Any, n_workers: int) -> tuple[tuple[int, ...], ...]:
    """Return the cores that each worker is pinned to.

    Args:
        cpus: A number or a set of numbers for each worker; ``"split"`` for an even share of those that this
            process may use: several each, or one that several workers share.
        n_workers: How many workers there are.
    """
    if not hasattr(os, "sched_setaffinity"):
        msg = f"cpus={cpus!r} pins workers to cores, which {sys.platform} has no call for; leave it out"
        raise ConfigError(msg)
    available = sorted(os.sched_getaffinity(0))
    if cpus == "split":
        shares = []
        for worker in range(n_workers):
            start = worker * len(available) // n_workers
            stop = (worker + 1) * len(available) // n_workers
            shares.append(tuple(available[start : max(stop, start + 1)]))  # one at least
        return tuple(shares)
    if not isinstance(cpus, Sequence) or isinstance(cpus, str | bytes):
        msg = f"cpus must be 'split', or cores for each worker such as [{{0, 1}}, {{2, 3}}], got {cpus!r}"
        raise ConfigError(msg)
    if len(cpus) != n_workers:
        msg = f"cpus={cpus!r} has cores for {len(cpus)} workers, and there are {n_workers}; give each its own"
        raise ConfigError(msg)
    return tuple(_check_cores(worker, own, available) for worker, own in enumerate(cpus))


def _check_cores(worker: int, own: Any, available: list[int]) -> tuple[int, ...]:
    cores: tuple[Any, ...] = (own,)
    if isinstance(own, Collection) and not isinstance(own, str | bytes):
        cores = tuple(own)
    if not cores or not all(isinstance(core, int) and not isinstance(core, bool) for core in cores):
        msg = f"cpus must have at least one core, by its number, for worker {worker}, got {own!r}"
        raise ConfigError(msg)
    for core in cores:
        if core not in available:
            allowed = ", ".join(map(str, available))
            msg = f"cpus has core {core} for worker {worker}, and this process may use {allowed} alone"
            raise ConfigError(msg)
    return tuple(sorted(set(cores)))


_ON_WINDOWS = (
    "tp-runner's worker processes need Linux or macOS; on Windows give engine='thread', engine='inline' or "
    "engine='ray', or work in WSL"
)


def warn_of_platform() -> None:
    """Warn at import that this platform has no worker processes."""
    if sys.platform == "win32":
        warnings.warn(_ON_WINDOWS, RuntimeWarning, stacklevel=3)


def require_processes() -> None:
    """Refuse worker processes where there can be none."""
    try:
        import fcntl  # noqa: F401 - what Windows lacks
    except ModuleNotFoundError:
        raise ConfigError(_ON_WINDOWS) from None


# -- Batches ------------------------------------------------------------------------------------

NOT_AWAITED = (
    "{name} is async: workers call it, and nobody awaits what it returns; give a function that runs it, such "
    "as lambda item: asyncio.run({name}(item)), or with batch= one that gathers many at a time"
)

# Of inspect: CO_COROUTINE | CO_ASYNC_GENERATOR. Its import would be a tenth of a first start.
ASYNC_FLAGS = 0x80 | 0x200


def refuse_async(function: Any) -> None:
    """Refuse ``async def`` work by its name, on every engine."""
    while isinstance(function, functools.partial):
        function = function.func
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    if code is not None and code.co_flags & ASYNC_FLAGS:
        raise ConfigError(NOT_AWAITED.format(name=code.co_qualname))


# Neither this nor the settings are dataclasses: making those is a large part of the time of a first start.
class Batching:
    """The size of a batch, and how its items are joined.

    Args:
        size: The most items of one batch; the last one may have fewer.
        collate: Makes a batch of a list of items.
    """

    __slots__ = ("collate", "size")

    def __init__(self, size: int, collate: Callable[[list[Any]], Any] | None = None) -> None:
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            msg = f"batch must be a whole number of at least 1, got {size!r}"
            raise ConfigError(msg)
        if collate is not None and not callable(collate):
            msg = f"collate must be a function of a list of items, got {collate!r}"
            raise ConfigError(msg)
        refuse_async(collate)
        self.size = size
        self.collate = collate

    @classmethod
    def of(cls, size: Any, collate: Any, max_wait_s: Any = None) -> Self | None:
        if size is not None:
            return cls(size, collate)
        for name, value in (("collate", collate), ("max_wait_s", max_wait_s)):
            if value is not None:
                msg = f"{name} is about batches; give batch= too, how many items make one"
                raise ConfigError(msg)
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        if self.collate is None:
            return Batching, (self.size,)
        return Batching, (self.size, _PickledFunction(dumps_by_value(self.collate)))

    def join(self, items: list[Any]) -> Any:
        return (self.collate or collate)(items)


class _PickledFunction:
    """A pickled function, loaded by its first call: so a failure to load it is an item's failure."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    @functools.cached_property
    def _function(self) -> Callable[[list[Any]], Any]:
        function: Callable[[list[Any]], Any] = pickle.loads(self._data)
        return function

    def __call__(self, items: list[Any]) -> Any:
        return self._function(items)


def collate(items: list[Any]) -> Any:
    """Stack tensors or arrays of one shape along a new first axis; anything else stays a list."""
    first = items[0]
    module = type(first).__module__
    if (module, type(first).__name__) not in {("torch", "Tensor"), ("numpy", "ndarray")}:
        return items
    for item in items:
        if type(item) is not type(first) or item.shape != first.shape or item.dtype != first.dtype:
            return items
    return sys.modules[module].stack(items)


def separate(answer: Any, n_items: int) -> list[Any]:
    """Split a sequence, tensor or array along its first axis; a mapping's values one by one."""
    if isinstance(answer, Mapping):
        columns = {key: separate(value, n_items) for key, value in answer.items()}
        return [{key: column[i] for key, column in columns.items()} for i in range(n_items)]
    is_array = hasattr(answer, "shape") and hasattr(answer, "__getitem__")
    is_text = isinstance(answer, str | bytes)
    if is_text or not (is_array or isinstance(answer, Sequence)):
        msg = (
            f"work on a batch of {n_items} items must return a sequence, tensor, array or mapping "
            f"with {n_items} results, got {type(answer).__name__}"
        )
        raise TypeError(msg)
    n_results = 0  # of an array without dimensions, which has no length
    if not hasattr(answer, "shape") or answer.shape:
        n_results = len(answer)
    if n_results != n_items:
        msg = f"work on a batch of {n_items} items returned {n_results} results; return one for each"
        raise ValueError(msg)
    return list(answer)


# -- Options ------------------------------------------------------------------------------------

START_TIMEOUT_S = 600.0
END_TIMEOUT_S = 60.0
PLACEMENTS = ("pack", "spread", "strict_pack", "strict_spread")
START_METHODS = ("forkserver", "spawn", "fork")


class ItemOptions(TypedDict, total=False):
    """The options of :class:`RunnerOptions` without batches and ``on_error``, which change result types."""

    cpus: Literal["split"] | Sequence[int | Collection[int]] | None
    end_timeout_s: float | None
    env: Mapping[str, str | None] | None
    log_level: int | str | None
    max_bytes: int | None
    max_items_per_worker: int | None
    max_memory_per_worker: int | None
    max_restarts: int | None
    max_retries: int | None
    min_workers: int | None
    placement: Literal["pack", "spread", "strict_pack", "strict_spread"] | None
    preload: Sequence[str] | None
    resources: Mapping[str, float] | None
    retry_delay_s: float | None
    seed: int | None
    start_method: Literal["forkserver", "spawn", "fork"] | None
    start_timeout_s: float | None
    threads: int | None
    timeline: bool | None
    timeout_s: float | None


class RunnerOptions(ItemOptions, total=False):
    """The options of runners and ``map`` beyond their own arguments.

    Attributes:
        batch: How many items the work gets at once; the last batch may be smaller.
        collate: Makes a batch of a list of items; by default tensors and arrays of one shape are stacked,
            and anything else stays a list.
        cpus: Which cores each worker is pinned to: one number or set of numbers for each worker, or
            ``"split"`` for an even share of those that this process may use. A worker computes with as many
            threads then, where neither ``threads`` nor ``OMP_NUM_THREADS`` says otherwise.
        end_timeout_s: Seconds that workers may take over their ends, and over what they are at then; 60 by
            default. Those that take longer are killed, with a warning that names them.
        env: Variables of the workers' environment, on top of the caller's; ``None`` removes one. They are set
            before anything of the user's is imported there, and with a fork server before what it preloads.
        log_level: Which log records of workers reach the caller; by default those of the root logger's level.
        max_bytes: How many bytes of items and results of one stream may be on their way, those read ahead and
            those that the consumer has just got included; 256 MiB by default. One item is let through in
            any case, and one result that is larger than its item for each worker. The sizes of items
            that were not sent yet are taken from those before.
        max_items_per_worker: After how many items a worker is replaced by a new one, once it has done what
            it was given; for work that leaks.
        max_memory_per_worker: With how many bytes of private memory a worker is replaced in the same way.
        max_restarts: How often dead workers are started again in the runner's life; 0 by default.
        max_retries: How often a failed item is tried again; 0 by default.
        max_wait_s: Seconds that an incomplete batch waits for more items; by default as many as it takes.
        min_workers: With how many actors a Ray cluster begins; there are more, one for each device at most,
            only while all have been busy, and fewer again when some have nothing to do.
        on_error: ``"raise"`` a failure, or ``"return"`` it in the item's place.
        placement: How a Ray cluster holds places for all actors before the first one starts: ``"pack"`` on
            few nodes, ``"spread"`` over many; ``"strict_pack"`` and ``"strict_spread"`` or not at all.
        preload: Modules that the fork server imports once, before it forks workers, instead of each worker;
            none that starts threads or touches a CUDA device when it is imported.
        resources: The resources that one Ray actor takes of its cluster, by Ray's names.
        retry_delay_s: After how many seconds a failed item is tried again, twice as many each time up to
            16 times as many; other items do not wait for it. By default at once.
        seed: Makes the random numbers of each item depend on it and the item's place alone, whatever worker
            takes it; of each batch, on its first item's place. Those are ``tp_runner.item().rng``, and but
            on threads the global generators of Python, numpy and torch. By default no two workers have the
            same.
        start_method: ``"forkserver"``, ``"spawn"`` or ``"fork"``; for processes. By default the first, on
            macOS the second, as its own libraries may not survive a fork.
        start_timeout_s: Seconds that a worker's start may take; 600 by default, and on Ray, where a worker
            may wait for its place, any number.
        threads: How many threads each worker may compute with; by default ``OMP_NUM_THREADS``, or its share
            of the cores.
        timeline: Whether what each worker does when is kept for ``write_timeline``.
        timeout_s: Seconds that an item may take; its worker is replaced then.
    """

    batch: int | None
    collate: Callable[[list[Any]], Any] | None
    max_wait_s: float | None
    on_error: Literal["raise", "return"] | None


_NAMES_ELSEWHERE = {
    **dict.fromkeys(("max_workers", "n_jobs", "nprocs", "processes", "workers"), "n_workers"),
    **dict.fromkeys(("maxtasksperchild", "max_tasks_per_child", "worker_lifespan"), "max_items_per_worker"),
    "cpu_ids": "cpus",
    "mp_context": "start_method",
    "task_timeout": "timeout_s",
}
"""Names of options in other libraries, and ours for them."""

OPTIONS = (*sorted(RunnerOptions.__annotations__), "ordered", "queue_scale")
_ARGUMENTS = ("devices", "engine", "init", "n_workers", "progress")  # of `map` and runners themselves


class Settings(NamedTuple):
    """The checked options of :class:`tp_runner.RunnerOptions`, complete before the first worker starts.

    Attributes:
        ordered: Whether results come in the order of the items.
        queue_scale: How many items may be on their way for each worker; ``None`` to adapt.
        batching: How items are put together: ``batch`` and ``collate``.
        cpus: The cores of each worker.
        threads: How many threads each worker may compute with; ``None`` for as many as it has of ``cpus``.
        entropy: The base of items' seeds without ``seed``: another number for each set of workers.
    """

    start_method: str = "forkserver"
    preload: tuple[str, ...] = ()
    threads: int | None = 1
    cpus: tuple[tuple[int, ...], ...] | None = None
    env: Mapping[str, str | None] = {}  # nobody writes to it
    ordered: bool = True
    queue_scale: float | None = None
    max_bytes: int = 256 << 20
    on_error: str = "raise"
    max_retries: int = 0
    max_restarts: int = 0
    retry_delay_s: float = 0.0
    timeout_s: float | None = None
    batching: Batching | None = None
    max_wait_s: float | None = None
    log_level: int = 30
    timeline: bool = False
    seed: int | None = None
    entropy: int = 0
    start_timeout_s: float | None = None
    end_timeout_s: float = END_TIMEOUT_S
    max_items_per_worker: int | None = None
    max_memory_per_worker: int | None = None
    min_workers: int | None = None
    placement: str | None = None
    resources: Mapping[str, float] | None = None


def make_settings(
    engine: str,
    n_workers: int,
    options: Mapping[str, Any],
    unfit: Mapping[str, str],
    *,
    start_timeout_s: float | None = START_TIMEOUT_S,
) -> Settings:
    """Check options that were given by name; fill in the rest."""
    for name, value in options.items():
        if name not in OPTIONS:
            msg = f"unknown option {name!r} of engine {engine!r}{_hint_of_option(name)}"
            raise ConfigError(msg)
        reason = unfit.get(name)
        if reason is not None and value is not None and value != 0:
            msg = f"engine {engine!r} has no use for {name}={value!r}: {reason}"
            raise ConfigError(msg)
    chosen = {name: value for name, value in options.items() if value is not None}
    batching = Batching.of(chosen.pop("batch", None), chosen.pop("collate", None), chosen.get("max_wait_s"))
    # The defaults that are not constants, then what the caller has chosen.
    values: dict[str, Any] = {
        "threads": _default_threads(n_workers, chosen),
        "log_level": logging.getLogger().getEffectiveLevel(),
    }
    if sys.platform == "darwin" and not chosen.get("preload"):
        values["start_method"] = "spawn"
    if start_timeout_s is not None:
        values["start_timeout_s"] = start_timeout_s
    values |= chosen
    _check_choice(values, "start_method", START_METHODS)
    _check_choice(values, "on_error", ("raise", "return"))
    _check_choice(values, "placement", PLACEMENTS)
    for name in ("ordered", "timeline"):
        check_truth(values, name)
    _check_min_workers(chosen, n_workers)
    for name in ("max_retries", "max_restarts", "seed"):
        _check_whole(values, name, 0)
    for name in ("threads", "max_bytes", "max_items_per_worker", "max_memory_per_worker"):
        if values.get(name) is not None:
            _check_whole(values, name, 1)
    for name in (
        "timeout_s",
        "max_wait_s",
        "queue_scale",
        "start_timeout_s",
        "end_timeout_s",
        "retry_delay_s",
    ):
        _check_positive(values, name)
    if "retry_delay_s" in chosen and not values.get("max_retries"):
        msg = "retry_delay_s is about items that are tried again; give max_retries= too, how often"
        raise ConfigError(msg)
    _check_env(chosen)
    if "cpus" in chosen:
        values["cpus"] = cores_of_workers(chosen["cpus"], n_workers)
    values["log_level"] = _check_log_level(values["log_level"])
    values["preload"] = _check_preload(chosen.get("preload", ()), chosen.get("start_method"))
    _check_resources(chosen.get("resources", {}))
    return Settings(**values, batching=batching)


def _hint_of_option(name: str) -> str:
    """Return what an unknown option is called here, or which ones there are."""
    if name in _NAMES_ELSEWHERE:
        return f"; it is {_NAMES_ELSEWHERE[name]!r} here"
    if name in ("chunk_size", "chunksize"):
        return "; leave it out: how many items travel together follows from how long they take"
    from tp_core.messages import did_you_mean

    hint = did_you_mean(name, (*OPTIONS, *_ARGUMENTS))
    return hint or f"; there are: {', '.join(OPTIONS)}"


def _default_threads(n_workers: int, options: Mapping[str, Any]) -> int | None:
    """Return the user's ``OMP_NUM_THREADS``, or a worker's share of the cores."""
    environ = dict(os.environ)
    if isinstance(options.get("env"), Mapping):
        environ |= options["env"]
    count = environ.get("OMP_NUM_THREADS")
    if isinstance(count, str) and count.isdigit() and int(count):
        return int(count)
    if "cpus" in options:
        return None
    return max(1, available_cores() // n_workers)


def _check_min_workers(options: Mapping[str, Any], n_workers: int) -> None:
    _check_whole(options, "min_workers", 1)
    min_workers = options.get("min_workers", n_workers)
    if min_workers > n_workers:
        msg = f"min_workers={min_workers} is more than there are devices, {n_workers}; it is how many begin"
        raise ConfigError(msg)
    if min_workers < n_workers and "placement" in options:
        msg = (
            f"placement={options['placement']!r} holds places for all {n_workers} actors before they start; "
            f"leave out min_workers={min_workers}"
        )
        raise ConfigError(msg)


def _check_choice(values: Mapping[str, Any], name: str, choices: tuple[str, ...]) -> None:
    if name in values and values[name] not in choices:
        msg = f"{name} must be one of {', '.join(map(repr, choices))}, got {values[name]!r}"
        raise ConfigError(msg)


def check_truth(values: Mapping[str, Any], name: str) -> None:
    """Check that an option is ``True`` or ``False``: a text such as "no" would count as true."""
    value = values.get(name, False)
    if not isinstance(value, bool):
        msg = f"{name} must be True or False, got {value!r:.80}"
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


def _check_log_level(value: Any) -> int:
    levels = logging.getLevelNamesMapping()
    if isinstance(value, str) and value in levels:
        return levels[value]
    if not isinstance(value, int) or isinstance(value, bool):
        msg = f"log_level must be a level of logging such as logging.INFO or 'INFO', got {value!r}"
        raise ConfigError(msg)
    return value


def _check_preload(names: Any, start_method: str | None) -> tuple[str, ...]:
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        msg = f"preload must be names of modules, such as ['transformers'], got {names!r}"
        raise ConfigError(msg)
    if names and start_method not in {None, "forkserver"}:
        msg = f"preload={names!r} is what the fork server imports, and start_method={start_method!r} has none"
        raise ConfigError(msg)
    for name in names:
        if name not in sys.modules and not _module_exists(name):
            msg = f"preload names the module {name!r}, and there is none of this name"
            raise ConfigError(msg)
    return tuple(names)


def _module_exists(module: str) -> bool:
    from importlib.util import find_spec

    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # the package that it would be in
        return False


def _check_env(options: Mapping[str, Any]) -> None:
    env = options.get("env", {})
    if not isinstance(env, Mapping):
        msg = f"env must map names of variables to their values, such as {{'TZ': 'UTC'}}, got {env!r}"
        raise ConfigError(msg)
    for name, value in env.items():
        if not isinstance(name, str) or not name or not {"=", "\0"}.isdisjoint(name):
            msg = f"env has {name!r}, which cannot be the name of a variable"
            raise ConfigError(msg)
        if value is not None and (not isinstance(value, str) or "\0" in value):
            msg = f"env[{name!r}] must be a string, or None to remove the variable, got {value!r}"
            raise ConfigError(msg)
    own = env.get("OMP_NUM_THREADS")
    if "threads" in options and own is not None:
        msg = f"threads={options['threads']!r} and env's OMP_NUM_THREADS={own!r} say the same; give one"
        raise ConfigError(msg)


def _check_resources(value: Any) -> None:
    def is_amount(n: Any) -> bool:
        return isinstance(n, int | float) and not isinstance(n, bool) and 0 <= n < math.inf

    is_valid = isinstance(value, Mapping)
    if is_valid:
        is_valid = all(isinstance(name, str) and is_amount(n) for name, n in value.items())
    if not is_valid:
        msg = (
            "resources must say how much of each resource one worker takes, such as "
            f"{{'num_cpus': 2, 'num_gpus': 0.5}}, got {value!r}"
        )
        raise ConfigError(msg)
