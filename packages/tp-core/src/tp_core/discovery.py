"""Installed plugins, and the choice among the backends that they bring, for programs that host plugins."""

from typing import TYPE_CHECKING

from tp_core._lazy import lazy_exports

if TYPE_CHECKING:
    from tp_core._first_party import FIRST_PARTY as FIRST_PARTY
    from tp_core._first_party import OWN_PACKAGES as OWN_PACKAGES
    from tp_core.plugins._hooks import CONTRACT_VERSION as CONTRACT_VERSION
    from tp_core.plugins._hooks import OWN_COMMANDS as OWN_COMMANDS
    from tp_core.plugins._hooks import BrokenPlugin as BrokenPlugin
    from tp_core.plugins._hooks import Contribution as Contribution
    from tp_core.plugins._hooks import HookSpecs as HookSpecs
    from tp_core.plugins._hooks import PluginInfo as PluginInfo
    from tp_core.plugins._registry import ENTRY_POINT_GROUP as ENTRY_POINT_GROUP
    from tp_core.plugins._registry import NameConflict as NameConflict
    from tp_core.plugins._registry import PluginRegistry as PluginRegistry
    from tp_core.plugins._select import KNOWN_BACKENDS as KNOWN_BACKENDS
    from tp_core.plugins._select import Candidate as Candidate
    from tp_core.plugins._select import Selection as Selection
    from tp_core.plugins._select import check_backend_name as check_backend_name
    from tp_core.plugins._select import select as select
else:
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        {
            "tp_core._first_party": ["FIRST_PARTY", "OWN_PACKAGES"],
            "tp_core.plugins._hooks": [
                "CONTRACT_VERSION",
                "OWN_COMMANDS",
                "BrokenPlugin",
                "Contribution",
                "HookSpecs",
                "PluginInfo",
            ],
            "tp_core.plugins._registry": ["ENTRY_POINT_GROUP", "NameConflict", "PluginRegistry"],
            "tp_core.plugins._select": [
                "KNOWN_BACKENDS",
                "Candidate",
                "Selection",
                "check_backend_name",
                "select",
            ],
        },
    )
