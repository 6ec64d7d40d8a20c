from tp_core import errors as errors
from tp_core import plugins as plugins
from tp_core._devices._resolve import DeviceLoad as DeviceLoad
from tp_core._devices._resolve import DeviceSpec as DeviceSpec
from tp_core._devices._resolve import as_device as as_device
from tp_core._devices._resolve import available_devices as available_devices
from tp_core._devices._resolve import device_loads as device_loads
from tp_core._devices._resolve import least_busy as least_busy
from tp_core._devices._resolve import resolve_devices as resolve_devices
from tp_core._devices._transfer import recursive_pin as recursive_pin
from tp_core._devices._transfer import recursive_to as recursive_to
from tp_core._devices._tree import tree_leaves as tree_leaves
from tp_core._devices._tree import tree_map as tree_map
from tp_core._launch._environment import LaunchEnvironment as LaunchEnvironment

__version__: str
