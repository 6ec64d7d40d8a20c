"""What users of the tp packages share: devices, transfer, the launch environment, errors.

What authors of plugins need is in `tp_core.plugins`, what the tp packages share among themselves in
`tp_core.internal`. Names are imported when they are first used: most of them need torch, which takes most
of a second, and some of those who import this package, such as worker processes, need none of it.
"""

from typing import TYPE_CHECKING

from tp_core import errors
from tp_core._lazy import lazy_exports

if TYPE_CHECKING:
    from tp_core import plugins
    from tp_core._devices._load import DeviceLoad, device_loads, least_busy
    from tp_core._devices._resolve import DeviceSpec, as_device, available_devices, resolve_devices
    from tp_core._devices._transfer import recursive_pin, recursive_to
    from tp_core._devices._tree import tree_leaves, tree_map
    from tp_core._launch._environment import LaunchEnvironment

    __version__: str

__all__ = [
    "DeviceLoad",
    "DeviceSpec",
    "LaunchEnvironment",
    "as_device",
    "available_devices",
    "device_loads",
    "errors",
    "least_busy",
    "plugins",
    "recursive_pin",
    "recursive_to",
    "resolve_devices",
    "tree_leaves",
    "tree_map",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "_devices._load": ["DeviceLoad", "device_loads", "least_busy"],
            "_devices._resolve": ["DeviceSpec", "as_device", "available_devices", "resolve_devices"],
            "_devices._transfer": ["recursive_pin", "recursive_to"],
            "_devices._tree": ["tree_leaves", "tree_map"],
            "_launch._environment": ["LaunchEnvironment"],
            "plugins": [],
        },
    )
