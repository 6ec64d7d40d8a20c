"""The module ``torch.sim``: what programs ask of ``torch.cuda``, for simulated devices."""

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.types import Device

from tp_simulator._build import extension

_initialized = True


def index_of(device: "Device | str" = None) -> int:
    """Return the index of a device; of the current one for None, and for ``"sim"``."""
    if isinstance(device, int):
        index: int | None = device
    else:
        index = None if device is None else torch.device(device).index
    if index is None or index < 0:
        return current_device()
    return index


# -- Devices --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DeviceProperties:
    """What :func:`get_device_properties` returns."""

    name: str
    total_memory: int
    multi_processor_count: int = 1
    major: int = 8  # bfloat16 came with it
    minor: int = 0


def is_available() -> bool:
    """Return whether there is a simulated device."""
    return device_count() > 0


def is_initialized() -> bool:
    """Return whether a device has been used in this process."""
    return bool(extension().was_used())


def init() -> None:
    """Do nothing: devices are ready at once."""


_lazy_init = init


def _is_in_bad_fork() -> bool:
    return bool(extension().in_bad_fork())


def device_count() -> int:
    """Return how many devices there are."""
    return int(extension().device_count())


def current_device() -> int:
    """Return the index of this thread's current device."""
    return int(extension().current_device())


def set_device(device: Device) -> None:
    """Make a device the current one of this thread."""
    extension().set_device(index_of(device))


class device:  # noqa: N801 - the name of torch.cuda's
    """The context in which a device is the current one."""

    def __init__(self, device: Device) -> None:
        self.idx = index_of(device)
        self.prev_idx = -1

    def __enter__(self) -> None:
        self.prev_idx = current_device()
        extension().set_device(self.idx)

    def __exit__(self, *_: object) -> None:
        extension().set_device(self.prev_idx)


class device_of(device):  # noqa: N801 - as above
    """The context in which a tensor's device is the current one; of no effect for a tensor elsewhere."""

    def __init__(self, tensor: Tensor) -> None:
        is_on_device = tensor.device.type in {"sim", "cuda"}  # as it says, and under the name of CUDA's
        super().__init__(tensor.device.index if is_on_device else current_device())


def get_device_name(device: Device = None) -> str:
    """Return a name for a device."""
    return get_device_properties(device).name


def get_device_properties(device: Device = None) -> DeviceProperties:
    """Return the name of a device and how much memory it has."""
    return DeviceProperties("simulated accelerator", int(extension().total_memory(index_of(device))))


def get_device_capability(device: Device = None) -> tuple[int, int]:
    """Return what a device can do, in CUDA's terms: as the first cards with bfloat16."""
    properties = get_device_properties(device)
    return properties.major, properties.minor


def synchronize(device: Device = None) -> None:
    """Wait for all that a device has been given."""
    torch.accelerator.synchronize(index_of(device))


# -- Streams and events ---------------------------------------------------------------------------


def Stream(device: Device = None, priority: int = 0) -> torch.Stream:  # noqa: N802 - the name of torch.cuda's
    """Return one of a device's 32 streams, in turn."""
    return torch.Stream(device=torch.device("sim", index_of(device)), priority=priority)


def Event(enable_timing: bool = False, **options: Any) -> torch.Event:  # noqa: N802 - as above
    """Return an event of the current device."""
    return torch.Event(device="sim", enable_timing=enable_timing, **options)


def current_stream(device: Device = None) -> torch.Stream:
    """Return the current stream of a device."""
    return torch.accelerator.current_stream(index_of(device))


def default_stream(device: Device = None) -> torch.Stream:
    """Return the stream that a device begins with."""
    now = current_stream(device)
    return torch.Stream(stream_id=0, device_index=now.device_index, device_type=now.device_type)


def set_stream(stream: torch.Stream) -> None:
    """Make a stream the current one of its device, in this thread."""
    torch.accelerator.set_stream(stream)


@contextlib.contextmanager
def stream(stream: torch.Stream | None) -> Iterator[None]:
    """Have work launched on a stream; of no effect for None."""
    if stream is None:
        yield
        return
    with stream:
        yield


def is_current_stream_capturing() -> bool:
    """Return False: there are no graphs."""
    return False


# -- Memory ---------------------------------------------------------------------------------------


def memory_allocated(device: Device = None) -> int:
    """Return how many bytes tensors have on a device."""
    return torch.accelerator.memory_allocated(index_of(device))


def max_memory_allocated(device: Device = None) -> int:
    """Return the most bytes that tensors have had on a device."""
    return torch.accelerator.max_memory_allocated(index_of(device))


def memory_reserved(device: Device = None) -> int:
    """Return how many bytes the segments of a device have."""
    return torch.accelerator.memory_reserved(index_of(device))


def max_memory_reserved(device: Device = None) -> int:
    """Return the most bytes that the segments of a device have had."""
    return torch.accelerator.max_memory_reserved(index_of(device))


def memory_stats(device: Device = None) -> dict[str, Any]:
    """Return what the allocator of a device counts."""
    index = index_of(device)
    # torch asks no allocator that nothing has used. On a card, asking for the current device is a use.
    torch.empty(0, device=torch.device("sim", index))
    return dict(torch.accelerator.memory_stats(index))


def reset_peak_memory_stats(device: Device = None) -> None:
    """Let the peaks begin at what is in use now."""
    torch.accelerator.reset_peak_memory_stats(index_of(device))


def mem_get_info(device: Device = None) -> tuple[int, int]:
    """Return the bytes that no segment has, and all there are."""
    total = get_device_properties(device).total_memory
    return total - memory_reserved(device), total


def empty_cache() -> None:
    """Give back segments in which nothing is used."""
    torch.accelerator.empty_cache()


def ipc_collect() -> None:
    """Do nothing: no memory is shared with other processes."""


# -- Random numbers -------------------------------------------------------------------------------


default_generators: tuple[torch.Generator, ...] = tuple(
    extension().default_generator(index) for index in range(device_count())
)


def _generator(device: Device) -> torch.Generator:
    return default_generators[index_of(device)]


def manual_seed(seed: int) -> None:
    """Seed the generator of the current device."""
    _generator(None).manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    """Seed the generators of all devices."""
    for index in range(device_count()):
        _generator(index).manual_seed(seed)


def initial_seed() -> int:
    """Return the seed of the current device's generator."""
    return _generator(None).initial_seed()


def get_rng_state(device: "Device | str" = "sim") -> Tensor:
    """Return the state of a device's generator: its seed and its offset, in 16 bytes."""
    return _generator(device).get_state()


def get_rng_state_all() -> list[Tensor]:
    """Return the states of all devices' generators."""
    return [get_rng_state(index) for index in range(device_count())]


def set_rng_state(new_state: Tensor, device: "Device | str" = "sim") -> None:
    """Give a device's generator a state."""
    _generator(device).set_state(new_state)


def set_rng_state_all(new_states: Iterable[Tensor]) -> None:
    """Give the generators of all devices a state each."""
    for index, state in enumerate(new_states):
        set_rng_state(state, index)


# -- Precision ------------------------------------------------------------------------------------


def get_amp_supported_dtype() -> list[torch.dtype]:
    """Return the types that autocast may choose."""
    return [torch.bfloat16, torch.float16]


def is_bf16_supported(including_emulation: bool = True) -> bool:  # noqa: ARG001 - torch.cuda's parameter
    """Return True."""
    return True
