"""The devices join torch: once for a process, and for those that it starts."""

import atexit
import os

MOST_DEVICES = 16  # as in csrc/streams.h

_active = 0


def activate(devices: int = 2) -> None:
    """Add simulated devices ``sim:0``, ``sim:1`` and so on to torch, for this process and those it starts.

    The first call of all compiles a C++ extension, which takes a minute or two; it is kept for later ones. A
    program that must not be changed gets its devices from the environment: ``SIM_DEVICES=2 python train.py``.

    Args:
        devices: How many. Once there are some, a process keeps their number.

    Raises:
        ValueError: The number is not from 1 to 16.
        RuntimeError: This process has another number of them, or a device of another library.
        BuildError: The extension cannot be compiled here.

    Example:
        >>> activate(17)
        Traceback (most recent call last):
            ...
        ValueError: there can be 1 to 16 simulated devices, and not 17
    """
    if not 1 <= devices <= MOST_DEVICES:
        msg = f"there can be 1 to {MOST_DEVICES} simulated devices, and not {devices}"
        raise ValueError(msg)
    import torch  # noqa: F401 - the first import calls this function where SIM_DEVICES says so

    if _active:
        if _active != devices:
            msg = f"this process has {_active} simulated devices already, and cannot have {devices}"
            raise RuntimeError(msg)
        return
    _join(devices)


def number_of_devices() -> int:
    """Return how many devices are active in this process."""
    return _active


def _join(devices: int) -> None:
    import torch
    from torch.utils import backend_registration

    from tp_simulator._build import extension

    # The extension reads it, and so do the processes that this one starts, where torch calls autoload().
    os.environ["SIM_DEVICES"] = str(devices)
    native = extension()
    backend_registration.rename_privateuse1_backend("sim")
    native.register_hooks()

    from tp_simulator import _group, _torch_sim

    # The documented way to add a device's module, private by its name alone.
    torch._register_device_module("sim", _torch_sim)
    backend_registration.generate_methods_for_privateuse1_backend()
    _group.register()
    atexit.register(native.end)
    if seed := os.environ.get("SIM_HOSTILE"):
        native.be_late(int(seed))
    if os.environ.get("SIM_AS_CUDA"):
        from tp_simulator._cuda_names import give_cudas_names

        give_cudas_names()
    global _active  # noqa: PLW0603 - torch can be told once in a process
    _active = devices
