"""The registry in which the packages meet."""

import os
import threading
import traceback
from collections.abc import Mapping
from importlib.metadata import EntryPoint
from types import SimpleNamespace
from typing import Any, TypeVar

import pluggy

from tp_core._backend import Backend
from tp_core._collate import CollateAdapter
from tp_core._engine import Engine
from tp_core.errors import ContractError, DuplicateNameError, PluginError
from tp_core.plugins._contribution import BrokenPlugin, Contribution, PluginInfo
from tp_core.plugins._discovery import find_entry_points
from tp_core.plugins._markers import CONTRACT_VERSION, PROJECT_NAME, hookimpl
from tp_core.plugins._spec import Command, HookSpecs

__all__ = ["PluginRegistry", "registry"]

DISABLE_VARIABLE = "TP_DISABLE_PLUGINS"

T = TypeVar("T")

_HOOK_OF: Mapping[type, str] = {
    Backend: "tp_backends",
    CollateAdapter: "tp_collate_adapters",
    Engine: "tp_engines",
    Command: "tp_commands",
}


class PluginRegistry:
    """Plugins, found among the installed distributions and registered by scripts.

    Nothing is looked for before the first question. A plugin that fails to import or breaks the
    contract is left out and kept in :meth:`broken`; it never takes the host down. One method per
    hook gives what the plugins bring, with its origin, sorted by name.
    """

    def __init__(self, *, environ: Mapping[str, str] | None = None) -> None:
        self._environ = os.environ if environ is None else environ
        self._lock = threading.RLock()
        self._registered: list[tuple[PluginInfo, object]] = []
        self._reset()

    def _reset(self) -> None:
        self._manager = pluggy.PluginManager(PROJECT_NAME)
        self._manager.add_hookspecs(HookSpecs)
        self._discovered = False
        self._infos: dict[str, PluginInfo] = {}
        self._broken: dict[str, BrokenPlugin] = {}
        self._disabled: list[PluginInfo] = []
        self._cache: dict[type, tuple[Contribution[Any], ...]] = {}

    # -- joining ------------------------------------------------------------------------------

    def register(self, plugin: object, *, name: str | None = None) -> None:
        """Add a plugin of this process: a module or object with hook implementations.

        A backend, adapter, engine or command by itself is welcome too.

        Args:
            plugin: What joins.
            name: What to call it in messages; by default its own name.

        Raises:
            ContractError: The plugin breaks the hook contract.
            DuplicateNameError: A plugin of that name is there already.
        """
        plugin, name = _as_plugin(plugin, name)
        info = PluginInfo(name, name, "")
        with self._lock:
            self._discover()
            self._join(info, plugin)
            self._registered.append((info, plugin))

    def unregister(self, name: str) -> None:
        """Remove a plugin that :meth:`register` added.

        Raises:
            PluginError: No plugin of that name was registered by this process.
        """
        with self._lock:
            kept = [(info, plugin) for info, plugin in self._registered if info.name != name]
            if len(kept) == len(self._registered):
                names = ", ".join(repr(i.name) for i, _ in self._registered) or "none"
                msg = f"no plugin {name!r} was registered by this process; registered: {names}"
                raise PluginError(msg)
            self._registered = kept
            self._manager.unregister(name=name)
            del self._infos[name]
            self._cache.clear()

    def refresh(self) -> None:
        """Look for installed plugins again: after a ``pip install`` in a notebook, say."""
        with self._lock:
            registered = self._registered
            self._reset()
            self._discover()
            for info, plugin in registered:
                self._join(info, plugin)

    # -- asking -------------------------------------------------------------------------------

    def backends(self) -> tuple[Contribution[Backend], ...]:
        """Return the backends, sorted by name.

        Raises:
            DuplicateNameError: Two plugins bring a backend of the same name.
        """
        return self._collect(Backend)  # type: ignore[type-abstract]  # only compared against

    def collate_adapters(self) -> tuple[Contribution[CollateAdapter], ...]:
        """Return the collate adapters, sorted by name; raises as :meth:`backends` does."""
        return self._collect(CollateAdapter)  # type: ignore[type-abstract]  # only compared against

    def engines(self) -> tuple[Contribution[Engine], ...]:
        """Return the engines, sorted by name; raises as :meth:`backends` does."""
        return self._collect(Engine)  # type: ignore[type-abstract]  # only compared against

    def commands(self) -> tuple[Contribution[Command], ...]:
        """Return the sub-commands of ``tp``, sorted by name; raises as :meth:`backends` does."""
        return self._collect(Command)

    def plugins(self) -> tuple[PluginInfo, ...]:
        """Return the plugins that were loaded, sorted by name."""
        with self._lock:
            self._discover()
            return tuple(self._infos[name] for name in sorted(self._infos))

    def broken(self) -> tuple[BrokenPlugin, ...]:
        """Return the plugins that were left out, with the cause, sorted by name.

        Every hook is asked first, so that one that raises only then is here too.
        """
        with self._lock:
            for kind in _HOOK_OF:
                try:
                    self._collect(kind)
                except DuplicateNameError as error:
                    info = PluginInfo(f"two of one name among {_HOOK_OF[kind]}", "", "")
                    self._note_broken(info, error)
            return tuple(self._broken[name] for name in sorted(self._broken))

    def disabled(self) -> tuple[PluginInfo, ...]:
        """Return the plugins that ``TP_DISABLE_PLUGINS`` blocked, sorted by name."""
        with self._lock:
            self._discover()
            return tuple(self._disabled)

    def require(self, name: str) -> None:
        """Make sure that a plugin called ``name`` is not one of the broken ones.

        Raises:
            PluginError: It is broken, or it was blocked; the cause is chained.
        """
        with self._lock:
            self._discover()
            for broken in self._broken.values():
                if name in {broken.info.name, broken.info.distribution}:
                    msg = f"{broken}; it was left out. The cause is above; reinstall or remove it"
                    raise PluginError(msg) from broken.error
            for info in self._disabled:
                if name in {info.name, info.distribution}:
                    msg = f"plugin {info} is blocked by {DISABLE_VARIABLE}; unset it to use {name!r}"
                    raise PluginError(msg)

    # -- the machinery ------------------------------------------------------------------------

    def _discover(self) -> None:
        if self._discovered:
            return
        self._discovered = True
        listed = self._environ.get(DISABLE_VARIABLE, "").split(",")
        blocked = {name.strip() for name in listed if name.strip()}
        for info, point in find_entry_points():
            if blocked & {info.name, info.distribution}:
                self._disabled.append(info)
                continue
            try:
                self._join(info, _load(point))
            except (Exception, SystemExit) as error:  # noqa: BLE001 - a stranger's module
                self._note_broken(info, error)

    def _join(self, info: PluginInfo, plugin: object) -> None:
        """Register ``plugin`` with pluggy, or raise ``PluginError`` and leave no trace of it."""
        other = self._infos.get(info.name)
        if other is not None:
            msg = (
                f"two plugins are called {info.name!r}: one of {other.distribution!r}, one of "
                f"{info.distribution!r}; uninstall one, or block it with {DISABLE_VARIABLE}"
            )
            raise DuplicateNameError(msg)
        built_for = getattr(plugin, "tp_contract", CONTRACT_VERSION)
        if built_for != CONTRACT_VERSION:
            msg = (
                f"plugin {info} was built for version {built_for} of the hook contract, and this "
                f"tp-core has version {CONTRACT_VERSION}; install versions that match"
            )
            raise ContractError(msg)
        try:
            self._manager.register(plugin, name=info.name)
            self._manager.check_pending()
        except pluggy.PluginValidationError as error:
            self._manager.unregister(name=info.name)
            hooks = ", ".join(_HOOK_OF.values())
            msg = f"plugin {info} breaks the hook contract: {error}; the hooks are {hooks}"
            raise ContractError(msg) from error
        self._infos[info.name] = info
        self._cache.clear()

    def _collect(self, kind: type[T]) -> tuple[Contribution[T], ...]:
        with self._lock:
            self._discover()
            if kind not in self._cache:
                self._cache[kind] = self._ask(kind)
            return self._cache[kind]

    def _ask(self, kind: type[T]) -> tuple[Contribution[T], ...]:
        # Each implementation is called by itself: through pluggy's own call of all of them, one
        # that raises would take the others' answers with it.
        found: dict[str, Contribution[T]] = {}
        caller = getattr(self._manager.hook, _HOOK_OF[kind])
        for implementation in caller.get_hookimpls():
            info = self._infos[implementation.plugin_name]
            try:
                items = [_validated(item, kind, info) for item in implementation.function()]
            except Exception as error:  # noqa: BLE001 - a stranger's code
                self._note_broken(info, error)
                continue
            for item in items:
                name = _name_of(item)
                new = Contribution(item, info.name, info.distribution, info.version)
                if name in found:
                    msg = (
                        f"two {_HOOK_OF[kind].removeprefix('tp_')} are called {name!r}: one of "
                        f"{found[name].distribution!r}, one of {new.distribution!r}; uninstall "
                        f"one, or block its plugin with {DISABLE_VARIABLE}={new.plugin}"
                    )
                    raise DuplicateNameError(msg)
                found[name] = new
        return tuple(found[name] for name in sorted(found))

    def _note_broken(self, info: PluginInfo, error: BaseException) -> None:
        trace = "".join(traceback.format_exception(error))
        self._broken.setdefault(str(info), BrokenPlugin(info, error, trace))


def _load(point: EntryPoint) -> object:
    plugin: object = point.load()
    return plugin


def _as_plugin(plugin: object, name: str | None) -> tuple[object, str]:
    """Wrap a bare contribution in a plugin that brings it; return it with its name."""
    bare = plugin() if isinstance(plugin, type) and issubclass(plugin, tuple(_HOOK_OF)) else plugin
    for kind, hook in _HOOK_OF.items():
        if isinstance(bare, kind):
            implementation = hookimpl(specname=hook)(lambda: [bare])
            return SimpleNamespace(**{hook: implementation}), name or _name_of(bare)
    return plugin, name or str(getattr(plugin, "__name__", type(plugin).__name__))


def _validated(item: object, kind: type[T], info: PluginInfo) -> T:
    if isinstance(item, type) and issubclass(item, kind):
        item = item()
    if not isinstance(item, kind):
        msg = (
            f"{_HOOK_OF[kind]} of plugin {info} must return {kind.__name__} objects, "
            f"got {type(item).__name__}: {item!r}"
        )
        raise ContractError(msg)
    name = getattr(item, "name", None)
    if not isinstance(name, str) or not name:
        msg = (
            f"{kind.__name__} {type(item).__name__} of plugin {info} needs a name: a class "
            f"attribute `name` that is a string and not empty, got {name!r}"
        )
        raise ContractError(msg)
    return item


def _name_of(item: object) -> str:
    name: str = item.name  # type: ignore[attr-defined]  # every kind of contribution has one
    return name


registry = PluginRegistry()
"""The registry of this process."""
