"""The common base of the tp packages: devices, transfer, the launch environment, errors.

It has three floors, and none imports one above it. *Replicas* are copies of a module in one process. *Ranks*
are sessions over processes, loaders, state and sharded models. The *kernel* is this module, the contracts of
plugins and the registry.

What authors of plugins need first is in `tp_core.plugins`; what packages share further is in modules by
purpose. Names are imported when they are first used: most of them need torch, which takes most of a second,
and some of those who import this package, such as worker processes, need none of it.
"""

from typing import TYPE_CHECKING

from tp_core._lazy import lazy_exports

if TYPE_CHECKING:
    from tp_core import errors as errors
    from tp_core import plugins as plugins
    from tp_core._devices import DeviceLoad as DeviceLoad
    from tp_core._devices import DeviceSpec as DeviceSpec
    from tp_core._devices import as_device as as_device
    from tp_core._devices import available_devices as available_devices
    from tp_core._devices import device_loads as device_loads
    from tp_core._devices import device_of_rank as device_of_rank
    from tp_core._devices import free_nbytes as free_nbytes
    from tp_core._devices import least_busy as least_busy
    from tp_core._devices import resolve_devices as resolve_devices
    from tp_core._launch._environment import LaunchEnvironment as LaunchEnvironment
    from tp_core._transfer import device_of as device_of
    from tp_core._transfer import move_module as move_module
    from tp_core._transfer import recursive_pin as recursive_pin
    from tp_core._transfer import recursive_to as recursive_to
    from tp_core._transfer import to_device as to_device
    from tp_core._trees import containers as containers
    from tp_core._trees import tree_leaves as tree_leaves
    from tp_core._trees import tree_map as tree_map

    __version__: str
else:
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        {
            "tp_core": ["errors", "plugins"],
            "tp_core._devices": [
                "DeviceLoad",
                "DeviceSpec",
                "as_device",
                "available_devices",
                "device_loads",
                "device_of_rank",
                "free_nbytes",
                "least_busy",
                "resolve_devices",
            ],
            "tp_core._launch._environment": ["LaunchEnvironment"],
            "tp_core._transfer": ["device_of", "move_module", "recursive_pin", "recursive_to", "to_device"],
            "tp_core._trees": ["containers", "tree_leaves", "tree_map"],
        },
    )
