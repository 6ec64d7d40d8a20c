"""From what a user writes to the devices of this process."""

import os
import re
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

import torch

from tp_core._devices._load import device_loads, least_busy, require_utilization
from tp_core._launch._environment import LaunchEnvironment
from tp_core.errors import DeviceError

__all__ = ["DeviceSpec", "as_device", "available_devices", "device_of_rank", "resolve_devices"]

DeviceSpec = str | int | torch.device | Sequence[str | int | torch.device] | None
"""What `resolve_devices` understands."""

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
        DeviceError: Something else was given, or what it asks for does not exist here.

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

    It need not exist here, unlike those of `resolve_devices`.

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
    return _CPU if device.type == "cpu" else device


def device_of_rank(
    devices: Sequence[torch.device],
    environment: LaunchEnvironment,
    *,
    explicit: bool,
    environ: Mapping[str, str] | None = None,
) -> torch.device:
    """Return the one device of this process, where a launcher started several on each host.

    Args:
        devices: What `resolve_devices` returned in this process.
        environment: What launched this process.
        explicit: Whether the user named the devices; else they are all that there are.
        environ: The environment variables; those of this process if ``None``.

    Raises:
        DeviceError: The devices cannot be shared out to the processes of this host. Each of them
            finds that out alone, so that none waits for another.
    """
    count, rank = environment.local_world_size, environment.local_rank
    if set(devices) == {_CPU} and len(devices) in (1, count):
        return _CPU
    if len(devices) == count or (not explicit and len(devices) > count):
        return devices[rank]
    if len(devices) == 1 and _is_isolated(os.environ if environ is None else environ):
        return devices[0]  # each process sees its own accelerator, and that under index 0
    problem = (
        f"{'' if explicit else 'as what is visible '}makes {_count(len(devices))} for the "
        f"{count} processes that the launcher started on this host (this one is local rank {rank})"
    )
    listed = ",".join(map(str, devices))
    remedy = (
        f"start as many processes as there are devices (tp launch -n {len(devices)}), name "
        f"{_count(count)}, one for each process, or write 'cpu'"
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
        problem = f"is of type {cls}" if entry is spec else f"has {entry!r} of type {cls} in it"
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
    return accelerators if device.index is None else (_at(device.index, spec),)


def _first(count: int, spec: object) -> tuple[torch.device, ...]:
    if count < 1:
        raise _refusal(spec, "asks for less than one device", "write a count from 1 on, or 'auto'")
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
    return f"{number} device{'' if number == 1 else 's'}"


def _what_exists() -> str:
    if accelerators := _accelerators():
        seen = f"this process sees {', '.join(map(str, accelerators))} and the cpu"
    elif torch.accelerator.current_accelerator() is None:
        seen = f"this process sees the cpu alone (torch {torch.__version__} is built for no other)"
    else:
        seen = "this process sees the cpu alone"
    hiding = [f"{n}={os.environ[n]!r}" for n in _VISIBILITY_VARIABLES if n in os.environ]
    return f"{seen} under {', '.join(hiding)}" if hiding else seen


def _refusal(spec: object, problem: str, remedy: str, *, name: str = "devices") -> DeviceError:
    return DeviceError(f"{name}={spec!r} {problem}; {_what_exists()}; {remedy}")
