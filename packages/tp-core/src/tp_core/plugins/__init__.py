"""The plugin registry: where the packages, and everybody else's, meet.

A distribution joins by an entry point in the group ``tp.plugins`` that names a light module with
hook implementations; a script joins by ``registry.register(...)``.
"""

from tp_core.plugins._contribution import BrokenPlugin, Contribution, PluginInfo
from tp_core.plugins._discovery import ENTRY_POINT_GROUP
from tp_core.plugins._markers import CONTRACT_VERSION, hookimpl
from tp_core.plugins._registry import PluginRegistry, registry
from tp_core.plugins._spec import Command, HookSpecs

__all__ = [
    "CONTRACT_VERSION",
    "ENTRY_POINT_GROUP",
    "BrokenPlugin",
    "Command",
    "Contribution",
    "HookSpecs",
    "PluginInfo",
    "PluginRegistry",
    "hookimpl",
    "registry",
]
