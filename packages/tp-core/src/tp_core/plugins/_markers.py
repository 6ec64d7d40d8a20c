"""The marker of hook implementations, in a module that imports next to nothing."""

import pluggy

PROJECT_NAME = "tp"

CONTRACT_VERSION = 1
"""The major version of the hook contracts. A plugin names the one it was built for as
``tp_contract = 1``; another major version is refused with a sentence."""

hookspec = pluggy.HookspecMarker(PROJECT_NAME)
hookimpl = pluggy.HookimplMarker(PROJECT_NAME)
"""Decorates a plugin's implementations of the hooks in :class:`tp_core.plugins.HookSpecs`."""
