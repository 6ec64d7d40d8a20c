"""An accelerator for torch without hardware, hostile by choice.

::

    _autoload       what torch calls in every process: activates where SIM_DEVICES is set
    _activation     activate(): the devices join torch
    _build          compiles the extension at first use, and keeps it
    _torch_sim      the module torch.sim
    _cuda_names     devices under the name of CUDA's
    _group          the process group simccl
    _control        hostile(), watch(), and what a device is made to suffer
    _pytest_plugin  pytest --device=sim
    _lines          the line of Python that a race was found at
    csrc/           the devices themselves, a file for each concept:
      clocks.h        which work is ordered after which
      streams.h       streams, queues, events, and when work runs
      memory.h        addresses, the caching allocator, pinned memory
      generators.h    random numbers
      tensors.h       making, viewing and resizing tensors
      copies.h        copies from and to the host, and between devices
      group.h         collectives between processes
      kernels.h       all other operations
      recurrent.h     cells of LSTM and GRU layers
      cuda_names.h    "cuda" for "sim" in what Python sees
      module.cpp      what torch and Python call

Importing this package changes nothing in torch; :func:`activate` does, or ``SIM_DEVICES`` in the environment.
"""

from tp_simulator._activation import activate
from tp_simulator._control import Report, fail_at_kernel, hostile, limit_memory, revive, watch
from tp_simulator.errors import BuildError

__all__ = [
    "BuildError",
    "Report",
    "activate",
    "fail_at_kernel",
    "hostile",
    "limit_memory",
    "revive",
    "watch",
]


def __getattr__(name: str) -> str:
    if name != "__version__":
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    from importlib.metadata import version

    return version("tp-simulator")
