"""What differs between types of devices: the one place that knows types by their names.

All other code asks torch, or asks here. A type that is not named here, such as one of a plugin of torch, is
taken for an accelerator with memory of its own, floats of 64 bits, and process groups that find its device.

torch is imported where it is asked: processes without torch look at names of devices, too.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = [
    "EXAMPLE",
    "MOVE_METHOD",
    "binds_process_groups",
    "caches_segments",
    "can_broadcast",
    "has_generators",
    "has_process_groups",
    "has_unreported_utilization",
    "is_capturing",
    "is_counted_by_ray",
    "library_versions",
    "lightning_accelerators",
    "memory_block",
    "packs_recurrent_weights",
    "uses_pinned_memory",
    "wide_float",
]

EXAMPLE = "cuda"
"""The type of devices that only stand for some: in estimates for machines that are not here."""

MOVE_METHOD = "cuda"
"""The method by which objects move to an accelerator that have no ``.to()``."""

_APPLE = "mps"


def wide_float(*devices: "torch.device") -> "torch.dtype":
    """Return the widest float that devices have: float64, and float32 where one of them has none."""
    import torch

    if any(device.type == _APPLE for device in devices):
        return torch.float32
    return torch.float64


def uses_pinned_memory(device_type: str) -> bool:
    """Return whether copies to a device overlap with other work if they come from page-locked memory."""
    return device_type not in ("cpu", _APPLE)


def has_generators(device_type: str) -> bool:
    """Return whether each device has a generator, by its index; of others there is one for all."""
    return device_type != _APPLE


def has_process_groups(device_type: str) -> bool:
    """Return whether torch has process groups for the tensors of a device."""
    return device_type != _APPLE


def binds_process_groups(device: "torch.device") -> bool:
    """Return whether process groups of a device are bound to it, as NCCL's are; others use the current one.

    Beside such a group torch (2.13) makes one of gloo for CUDA's devices alone.
    """
    return device.type == "cuda"


def memory_block(device_type: str) -> int:
    """Return the bytes of which the allocator of a device hands out multiples.

    For accelerators these are 512, ``kMinBlockSize`` of torch's CUDACachingAllocator.
    """
    if device_type == "cpu":
        return 1
    return 512


def caches_segments(device_type: str) -> bool:
    """Return whether memory of a device is reserved in segments, by the rules of CUDA's allocator.

    Allocators of torch for other accelerators have taken these over, but for Apple's.
    """
    return device_type not in ("cpu", _APPLE)


def is_capturing(device: "torch.device") -> bool:
    """Return whether kernels are recorded into a graph at present: nothing can be read or drawn then."""
    if device.type != "cuda":
        return False
    import torch

    return torch.cuda.is_current_stream_capturing()


def can_broadcast(devices: "Iterable[torch.device]") -> bool:
    """Return whether torch copies a tensor from one of these devices to the others at once."""
    return all(device.type == "cuda" for device in devices)


def packs_recurrent_weights(device: "torch.device") -> bool:
    """Return whether kernels of recurrent layers expect all weights in one piece of memory, as cuDNN's do."""
    return device.type == "cuda"


def lightning_accelerators() -> tuple[str, ...]:
    """Return what Lightning names accelerators by."""
    return ("auto", "cpu", "gpu", "cuda", _APPLE)


def has_unreported_utilization(device_type: str) -> bool:
    """Return whether how busy a device is can only be learned from another package, NVML's."""
    if device_type != "cuda":
        return False
    import torch

    return not torch.version.hip


def is_counted_by_ray(device_type: str) -> bool:
    """Return whether Ray has devices of this type as its resource "GPU", and shows an actor its own alone."""
    return device_type == "cuda"


def library_versions() -> dict[str, str]:
    """Return the versions of what torch was built with for accelerators, where it was."""
    import torch

    versions = {"cuda": torch.version.cuda, "hip": torch.version.hip}
    has_nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()  # not on Windows
    if has_nccl and torch.cuda.is_available() and torch.version.cuda is not None:
        versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return {name: text for name, text in versions.items() if text is not None}
