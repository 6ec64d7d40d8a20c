"""The markers of hooks, in a module that imports only pluggy: every plugin imports it."""

import pluggy

PROJECT_NAME = "tp"

CONTRACT_VERSION = 1
"""The major version of the hook contracts. A plugin declares the one it was built for as
``tp_contract = 1``; a plugin for another one is left out, with a message."""

hookspec = pluggy.HookspecMarker(PROJECT_NAME)
hookimpl = pluggy.HookimplMarker(PROJECT_NAME)
"""The decorator of a plugin's implementations of the hooks in :class:`tp_core.discovery.HookSpecs`."""
