"""Resolution of device requests to the devices of this process, and the load of devices."""

import importlib.util
import os
import platform
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from numbers import Integral
from pathlib import Path
from typing import Any

import torch

from tp_core._launch._environment import LaunchEnvironment
from tp_core.device_types import has_unreported_utilization
from tp_core.errors import DeviceError

# -- Load of devices ------------------------------------------------------------------------------


_BUCKETS = 10
"""The step of utilization in comparisons: it is sampled over a fraction of a second, and less is noise."""


@dataclass(frozen=True, slots=True)
class DeviceLoad:
    """The load of one device; values that the system does not report are ``None``.

    Attributes:
        device: The device.
        name: The maker's name of it.
        free_bytes: Its free memory, in bytes.
        total_bytes: Its whole memory, in bytes.
        utilization: The fraction of the last moment in which it worked, 0 to 1; for the CPU, the
            load average of the last minute over its cores.
    """

    device: torch.device
    name: str
    free_bytes: int | None
    total_bytes: int | None
    utilization: float | None


def device_loads() -> tuple[DeviceLoad, ...]:
    """Return the load of every accelerator that this process sees, or of the CPU if there is none.

    Utilization of NVIDIA devices comes from NVML, through torch, and needs ``tp-core[nvml]``. Without
    that it is ``None``, and the query of free memory opens a context on each device.

    Example:
        >>> len(device_loads()) >= 1
        True
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return (_cpu_load(),)
    count = torch.accelerator.device_count()
    return tuple(_accelerator_load(torch.device(accelerator.type, i)) for i in range(count))


def least_busy(loads: Sequence[DeviceLoad], count: int) -> tuple[DeviceLoad, ...]:
    """Return the ``count`` least busy of ``loads``, the best first.

    Lower utilization wins, in steps of ten percent; then more free memory; then the lower index.
    Unknown values count as worst.

    Raises:
        DeviceError: There are fewer than ``count`` devices.
    """
    if count > len(loads):
        names = ", ".join(str(load.device) for load in loads) or "none"
        msg = f"asked for the {count} least busy of {len(loads)} devices ({names}); ask for less"
        raise DeviceError(msg)

    def rank(load: DeviceLoad) -> tuple[int, int, int]:
        used = load.utilization
        if used is None:
            bucket = _BUCKETS + 1
        else:
            bucket = int(used * _BUCKETS)
        return (bucket, -(load.free_bytes or 0), load.device.index or 0)

    return tuple(sorted(loads, key=rank)[:count])


def require_utilization(loads: Sequence[DeviceLoad]) -> None:
    """Check that the load of every device is known.

    Where the driver itself does not report utilization, free memory alone may decide.
    """
    unknown = [
        load for load in loads if load.utilization is None and has_unreported_utilization(load.device.type)
    ]
    if unknown and importlib.util.find_spec("pynvml") is None:
        msg = (
            f"how busy {unknown[0].device} ({unknown[0].name}) is not known without NVML; run "
            "pip install 'tp-core[nvml]', or name the devices, as in devices='cuda:0'"
        )
        raise DeviceError(msg)


def _accelerator_load(device: torch.device) -> DeviceLoad:
    module = torch.get_device_module(device)
    properties = _ask(module, "get_device_properties", device)  # Apple's module has no such function
    total: int | None = getattr(properties, "total_memory", None)
    percent = _ask(module, "utilization", device)
    utilization = None if percent is None else percent / 100
    used = _ask(module, "device_memory_used", device)
    if used is not None and total is not None:
        free: int | None = max(0, total - int(used))
    else:
        free = free_memory(device)
    return DeviceLoad(
        device=device,
        name=str(getattr(properties, "name", device.type)),
        free_bytes=free,
        total_bytes=total,
        utilization=utilization,
    )


def _ask(module: Any, name: str, device: torch.device) -> Any:
    """Call a function of a device's module; return ``None`` without it or the vendor's library."""
    function: Callable[[torch.device], Any] | None = getattr(module, name, None)
    if function is None:
        return None
    try:
        return function(device)
    except _management_errors():
        return None


def _management_errors() -> tuple[type[Exception], ...]:
    """Return the errors that torch raises for a missing library, and the library for a missing feature."""
    errors: list[type[Exception]] = [ImportError, RuntimeError]
    for library, name in (("pynvml", "NVMLError"), ("amdsmi", "AmdSmiException")):
        if importlib.util.find_spec(library) is not None:
            errors.append(getattr(import_module(library), name))
    return tuple(errors)


def free_memory(device: torch.device) -> int | None:
    try:
        return torch.accelerator.get_memory_info(device)[0]
    except (RuntimeError, NotImplementedError):
        return None


def _cpu_load() -> DeviceLoad:
    total = _pages("SC_PHYS_PAGES")
    cores = os.cpu_count() or 1
    if hasattr(os, "getloadavg"):
        busy = min(1.0, os.getloadavg()[0] / cores)
    else:
        busy = None
    return DeviceLoad(
        device=torch.device("cpu"),
        name=platform.processor() or platform.machine() or "cpu",
        free_bytes=available_memory(),
        total_bytes=total,
        utilization=busy,
    )


def available_memory() -> int | None:
    """Return the host memory that programs can still get: unused memory, and caches that the system frees."""
    available = _kernels_count(Path("/proc/meminfo"), "MemAvailable")
    if available is None:
        return _pages("SC_AVPHYS_PAGES")
    return available


def _kernels_count(file: Path, name: str) -> int | None:
    """Return the bytes that Linux reports in a file under a name; ``None`` on other systems."""
    if file.exists():
        lines = file.read_text("ascii", errors="replace").splitlines()
    else:
        lines = []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), None)


def _pages(name: str) -> int | None:
    if name not in getattr(os, "sysconf_names", {}):
        return None
    return os.sysconf(name) * os.sysconf("SC_PAGE_SIZE")


# -- Free memory for this process -----------------------------------------------------------------


def free_nbytes(device: torch.device, *, processes: int = 1) -> int | None:
    """Return how many bytes more this process can get on a device; ``None`` if that is not known.

    Args:
        device: The device.
        processes: The number of processes that share the host's memory, where the device is the CPU.

    On an accelerator, torch's cache counts as free. On the CPU it is the least of the host's available
    memory, the rest of a control group's limit, and the limits of this process (``ulimit -v``, ``-d``).
    """
    if device.type != "cpu":
        free = free_memory(device)
        if free is None:
            return None
        kept = torch.accelerator.memory_reserved(device) - torch.accelerator.memory_allocated(device)
        return free + max(0, kept)
    shared = [n for n in (available_memory(), _left_in_group()) if n is not None]
    own = [n for n in (_left_to("RLIMIT_AS", "VmSize"), _left_to("RLIMIT_DATA", "VmData")) if n is not None]
    return min([*(n // processes for n in shared), *own], default=None)


def _left_in_group() -> int | None:
    """Return the rest of the memory limit of a container's or batch system's control group."""
    place = Path("/sys/fs/cgroup")
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            most, now = (place / limit).read_text("ascii").strip(), (place / used).read_text("ascii").strip()
        except OSError:
            continue
        if most.isdecimal() and now.isdecimal():
            return max(0, int(most) - int(now))
    return None


def _left_to(limit: str, used: str) -> int | None:
    """Return the rest of a limit of this process, from the kernel's count under ``used``."""
    try:
        import resource
    except ImportError:  # on Windows
        return None
    most = resource.getrlimit(getattr(resource, limit))[0]
    if most == resource.RLIM_INFINITY:
        now = None
    else:
        now = _kernels_count(Path("/proc/self/status"), used)
    if now is None:
        return None
    return max(0, most - now)


# -- Device requests ------------------------------------------------------------------------------


DeviceSpec = str | int | torch.device | Sequence[str | int | torch.device] | None
"""A device request, as `resolve_devices` takes it."""

_CPU = torch.device("cpu")
_VISIBILITY_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "ZE_AFFINITY_MASK",
    "ASCEND_RT_VISIBLE_DEVICES",
)
_WRITE = "'auto', a count like 2, 'cpu', 'cuda:1', [0, 1], 'cuda:0,cpu' or 'idle:2'"


def available_devices() -> tuple[torch.device, ...]:
    """Return every accelerator that this process sees, or the one CPU where there is none.

    Variables like ``CUDA_VISIBLE_DEVICES`` count, because torch follows them.

    Example:
        >>> len(available_devices()) >= 1
        True
    """
    return _accelerators() or (_CPU,)


def resolve_devices(spec: DeviceSpec = "auto") -> tuple[torch.device, ...]:
    """Return the devices that ``spec`` asks for, each accelerator with its index.

    ===========================  ===================================================================
    ``"auto"``, ``None``         every accelerator that torch sees; the CPU where there is none
    ``2``, ``"2"``               the first two accelerators; where there is none, the CPU twice
    ``"cpu"``, ``"cpu:0"``       the CPU
    ``"cuda"``                   all devices of that type
    ``"cuda:1"``                 that one
    ``[0, 1]``, ``"0,1"``        the accelerators with these indices
    ``["cuda:0", "cpu"]``        a list or tuple, or a string with commas, of any of the above
                                 but counts; a device may occur twice
    ``"idle:2"``                 the two least busy accelerators, by utilization and free memory
    ===========================  ===================================================================

    Raises:
        DeviceError: The request is of another form, or names devices that do not exist here.

    Example:
        >>> resolve_devices(["cpu", "cpu"])
        (device(type='cpu'), device(type='cpu'))
    """
    if spec is None:
        return available_devices()
    if isinstance(spec, str):
        return _from_text(spec)
    if isinstance(spec, Integral) and not isinstance(spec, bool):
        return _first(int(spec), spec)
    if isinstance(spec, Sequence) and not isinstance(spec, bytes | bytearray):
        if not spec:
            raise _refusal(spec, "names no device", f"write {_WRITE}")
        return tuple(device for entry in spec for device in _entry(entry, spec))
    return _entry(spec, spec)


def as_device(device: torch.device | str | int) -> torch.device:
    """Return one device as torch compares them: a CPU without index, an ``int`` as an accelerator.

    It need not exist here, unlike the devices of `resolve_devices`.

    Raises:
        DeviceError: ``device`` is not the name of a device.

    Example:
        >>> as_device("cpu:0")
        device(type='cpu')
    """
    if not isinstance(device, torch.device):
        remedy = "write 'cpu', 'cuda:1' or an index like 0"
        if isinstance(device, bool) or not isinstance(device, str | int):
            problem = f"is of type {type(device).__name__}"
            raise _refusal(device, problem, remedy, name="device")
        try:
            device = torch.device(device)
        except RuntimeError as error:  # torch's message lists every type that it knows
            raise _refusal(device, "names no device", remedy, name="device") from error
    if device.type == "cpu":
        return _CPU
    return device


def device_of_rank(
    devices: Sequence[torch.device],
    environment: LaunchEnvironment,
    *,
    explicit: bool,
    environ: Mapping[str, str] | None = None,
) -> torch.device:
    """Return the one device of this process, where a launcher started several on each host.

    Args:
        devices: The result of `resolve_devices` in this process.
        environment: The launch environment of this process.
        explicit: Whether the user named the devices; otherwise they are all that exist.
        environ: The environment variables; this process's own if ``None``.
    """
    count, rank = environment.local_world_size, environment.local_rank
    if set(devices) == {_CPU} and len(devices) in (1, count):
        return _CPU
    if len(devices) == count or (not explicit and len(devices) > count):
        return devices[rank]
    environ = os.environ if environ is None else environ
    if len(devices) == 1 and _is_isolated(environ):
        return devices[0]  # each process sees its own accelerator, and that under index 0
    source = "" if explicit else "as what is visible "
    problem = (
        f"{source}makes {_count(len(devices))} for the "
        f"{count} processes that the launcher started on this host (this one is local rank {rank})"
    )
    listed = ",".join(map(str, devices))
    remedy = (
        f"start as many processes as there are devices (tp launch -n {len(devices)}, of tp-launch), "
        f"name {_count(count)}, one for each process, or write 'cpu'"
    )
    raise _refusal(listed, problem, remedy)


def _is_isolated(environ: Mapping[str, str]) -> bool:
    one_named = any(
        len([v for v in environ.get(name, "").split(",") if v.strip()]) == 1 for name in _VISIBILITY_VARIABLES
    )
    return one_named and len(_accelerators()) == 1


# -- one entry at a time --------------------------------------------------------------------------


def _from_text(spec: str) -> tuple[torch.device, ...]:
    text = spec.strip().lower()
    if text == "auto":
        return available_devices()
    if re.fullmatch(r"[+-]?\d+", text):
        return _first(int(text), spec)
    if text.startswith("idle"):
        return _idle(text, spec)
    return tuple(device for entry in text.split(",") for device in _entry(entry.strip(), spec))


def _entry(entry: Any, spec: object) -> tuple[torch.device, ...]:
    """Return the devices of one entry: one, or all of a type that was named without index."""
    if isinstance(entry, str):
        entry = entry.strip().lower()
        if re.fullmatch(r"[+-]?\d+", entry):
            entry = int(entry)
    if isinstance(entry, Integral) and not isinstance(entry, bool):
        return (_at(int(entry), spec),)
    if not isinstance(entry, str | torch.device):
        cls = type(entry).__name__
        if entry is spec:
            problem = f"is of type {cls}"
        else:
            problem = f"has {entry!r} of type {cls} in it"
        raise _refusal(spec, problem, f"write {_WRITE}")
    try:
        device = torch.device(entry)
    except RuntimeError as error:
        raise _refusal(spec, f"has {entry!r} in it, which is not a device", f"write {_WRITE}") from error
    if device.type == "cpu":
        return (_CPU,)
    accelerators = _accelerators()
    if not accelerators or accelerators[0].type != device.type:
        raise _refusal(spec, f"needs {device.type}, which is not here", _instead(accelerators))
    if device.index is None:
        return accelerators
    return (_at(device.index, spec),)


def _first(count: int, spec: object) -> tuple[torch.device, ...]:
    if count < 1:
        remedy = "write a count from 1 on, 'auto' for all devices, or [0] for the accelerator with index 0"
        raise _refusal(spec, "asks for less than one device", remedy)
    accelerators = _accelerators()
    if not accelerators:
        return (_CPU,) * count
    if count > len(accelerators):
        problem = f"asks for {_count(count)}"
        raise _refusal(spec, problem, f"{_instead(accelerators)}; in a list a device may occur twice")
    return accelerators[:count]


def _at(index: int, spec: object) -> torch.device:
    accelerators = _accelerators()
    if not 0 <= index < len(accelerators):
        problem = f"asks for the accelerator with index {index}, which does not exist"
        raise _refusal(spec, problem, _instead(accelerators))
    return accelerators[index]


def _idle(text: str, spec: object) -> tuple[torch.device, ...]:
    match = re.fullmatch(r"idle:(\d+)", text)
    if match is None or int(match[1]) < 1:
        raise _refusal(spec, "is not a request for idle devices", "write 'idle:' and a count, as in 'idle:2'")
    count, accelerators = int(match[1]), _accelerators()
    if count > len(accelerators):
        raise _refusal(spec, f"asks for {count} accelerators", _instead(accelerators))
    loads = device_loads()
    require_utilization(loads)
    return tuple(load.device for load in least_busy(loads, count))


# -- what exists ----------------------------------------------------------------------------------


def _accelerators() -> tuple[torch.device, ...]:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return ()
    count = torch.accelerator.device_count()
    return tuple(torch.device(accelerator.type, index) for index in range(count))


def _instead(accelerators: tuple[torch.device, ...]) -> str:
    if not accelerators:
        return "write 'auto', 'cpu', or a count for as many replicas on the CPU"
    return f"write 'auto', a count up to {len(accelerators)}, or some of the devices that exist"


def _count(number: int) -> str:
    plural = "" if number == 1 else "s"
    return f"{number} device{plural}"


def _what_exists() -> str:
    if accelerators := _accelerators():
        seen = f"this process sees {', '.join(map(str, accelerators))} and the cpu"
    elif torch.accelerator.current_accelerator() is None:
        seen = f"this process sees the cpu alone (torch {torch.__version__} is built for no other)"
    else:
        seen = "this process sees the cpu alone"
    hiding = [f"{n}={os.environ[n]!r}" for n in _VISIBILITY_VARIABLES if n in os.environ]
    if hiding:
        return f"{seen} under {', '.join(hiding)}"
    return seen


def _refusal(spec: object, problem: str, remedy: str, *, name: str = "devices") -> DeviceError:
    return DeviceError(f"{name}={spec!r} {problem}; {_what_exists()}; {remedy}")
