"""The plugin registry: it finds plugins, resolves names and caches contributions."""

import os
import re
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from email import message_from_string
from functools import partial
from importlib.metadata import EntryPoint, distributions, entry_points
from typing import TYPE_CHECKING, Any, TypeVar

import pluggy

from tp_core._first_party import FIRST_PARTY
from tp_core.errors import ContractError, DuplicateNameError, PluginError
from tp_core.plugins._hooks import (
    DISABLE_VARIABLE,
    HOOKS,
    OWN_COMMANDS,
    PROJECT_NAME,
    BrokenPlugin,
    Command,
    Contribution,
    HookSpecs,
    PluginInfo,
    all_validated,
    as_plugin,
    call,
    check_hooks_marked,
    class_of,
    contract_of,
    hook_of,
    name_of,
    word_of,
)

if TYPE_CHECKING:
    from tp_core._contracts._backend import Backend
    from tp_core._contracts._callback import NamedCallback
    from tp_core._contracts._collate import CollateAdapter
    from tp_core._contracts._engine import Engine
    from tp_core._contracts._logger import LoggerFactory

ENTRY_POINT_GROUP = "tp.plugins"
"""The group of entry points by which installed plugins are found."""

KEYWORD = "tp-plugin"
"""The keyword of distributions with plugins, by which people find them."""


def find_entry_points() -> Iterator[tuple[PluginInfo, EntryPoint | Exception]]:
    """Yield every installed plugin's entry point, sorted, without importing any.

    They are sorted by name, since the order of the file system differs between machines. Plugins of this
    project come first: of two plugins with one name the second is left out. For a distribution with
    unreadable files the error is yielded.
    """
    try:
        points: list[tuple[PluginInfo, EntryPoint | Exception]] = [
            _with_info(point) for point in entry_points(group=ENTRY_POINT_GROUP)
        ]
    except Exception:  # noqa: BLE001 - the files of one distribution are damaged: find which
        points = list(_one_by_one())
    yield from sorted(points, key=_order)


def _with_info(point: EntryPoint) -> tuple[PluginInfo, EntryPoint]:
    if point.dist is None:
        return PluginInfo(point.name, point.name, ""), point
    text = point.dist.read_text("METADATA") or point.dist.read_text("PKG-INFO") or ""
    # Without the description, a whole README: reading its lines took a quarter of the search for plugins.
    metadata = message_from_string(text.partition("\n\n")[0])
    return PluginInfo(point.name, metadata["Name"] or point.name, metadata["Version"] or ""), point


def _one_by_one() -> Iterator[tuple[PluginInfo, EntryPoint | Exception]]:
    met = set()
    for distribution in distributions():
        name = "?"
        try:
            name = distribution.name
            points = distribution.entry_points.select(group=ENTRY_POINT_GROUP)
            if name not in met:  # the first one on the path is the one that is imported
                yield from map(_with_info, points)
        except Exception as error:  # noqa: BLE001 - of files that are damaged
            yield PluginInfo(name, name, ""), error
        met.add(name)


def _order(entry: tuple[PluginInfo, EntryPoint | Exception]) -> tuple[bool, str, str]:
    info, _ = entry
    # First those of this project: of two plugins with one name the first to join keeps it.
    return info.distribution not in FIRST_PARTY, info.name, info.distribution


def load(info: PluginInfo, point: EntryPoint | Exception) -> object:
    if isinstance(point, Exception):
        raise point
    if not point.pattern.match(point.value):
        msg = f"its entry point must be 'module' or 'module:attribute', got {point.value!r}"
        raise ContractError(msg)
    plugin: object = call(info, "loaded", point.load)
    return plugin


def find_forgotten() -> list[str]:
    """Return the distributions with the keyword of plugins and no entry point."""
    return sorted(
        distribution.name
        for distribution in distributions()
        if KEYWORD in re.split(r"[,\s]+", ",".join(distribution.metadata.get_all("Keywords", [])))
        and not distribution.entry_points.select(group=ENTRY_POINT_GROUP)
    )


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class NameConflict:
    """A conflict of plugins that bring something of one kind under one name, for example two backends.

    Their other contributions stay. ``str()`` of it is the message for people.

    Attributes:
        kind: The kind, for messages: "backend".
        name: The name.
        kept: The plugin of this project that keeps the name; ``None`` if no plugin has it.
        left_out: The plugins that lose theirs.
    """

    kind: str
    name: str
    kept: PluginInfo | None
    left_out: tuple[PluginInfo, ...]

    def __str__(self) -> str:
        theirs = " and ".join(map(str, self.left_out))
        blocks = " or ".join(dict.fromkeys(f"{DISABLE_VARIABLE}={info.name}" for info in self.left_out))
        if self.kept is not None:
            return (
                f"the {self.kind} {self.name!r} of plugin {theirs} is left out: {self.kept} brings one of "
                f"that name; rename the one in {theirs}, uninstall it, or block it with {blocks}"
            )
        return (
            f"{len(self.left_out)} {self.kind}s are called {self.name!r}, of the plugins {theirs}, and all "
            f"of them are left out; uninstall one, or block its plugin with {blocks}"
        )


def resolve_conflicts(
    kind: str, contributions: Iterable[Contribution[T]], *, own: Mapping[str, PluginInfo]
) -> tuple[tuple[Contribution[T], ...], tuple[NameConflict, ...]]:
    """Return the contributions that keep their names, sorted by name, and the conflicts.

    A plugin of this project keeps its name. Between others the choice would be arbitrary: none gets it.
    """
    by_name: dict[str, list[Contribution[Any]]] = {}
    for contribution in contributions:
        item: Any = contribution.item
        by_name.setdefault(item.name, []).append(contribution)
    kept: list[Contribution[T]] = []
    conflicts = []
    for name, wanting in sorted(by_name.items()):
        if len(wanting) == 1 and name not in own:
            kept += wanting
            continue
        first_party = next((c for c in wanting if c.distribution in FIRST_PARTY and name not in own), None)
        if first_party is not None:
            kept.append(first_party)
        left_out = tuple(_info(c) for c in wanting if c is not first_party)
        if first_party is None:
            owner = own.get(name)
        else:
            owner = _info(first_party)
        conflicts.append(NameConflict(kind, name, owner, left_out))
    return tuple(kept), tuple(conflicts)


def _info(contribution: Contribution[Any]) -> PluginInfo:
    return PluginInfo(contribution.plugin, contribution.distribution, contribution.version)


_TP_CORE = PluginInfo("tp-core", "tp-core", "")


class PluginRegistry:
    """Plugins, found among the installed distributions and registered by scripts.

    The search happens at the first call that needs it. A plugin that fails to import or breaks the
    contract is left out and listed in :meth:`broken`; it never ends the program. One method per hook
    returns the contributions with their origin, sorted by name. Where several plugins bring one name, the
    one of this project keeps it; of others none has it: see :meth:`conflicts`.

    Args:
        environ: The mapping with ``TP_DISABLE_PLUGINS``; the process's environment by default.
    """

    def __init__(self, *, environ: Mapping[str, str] | None = None) -> None:
        self._environ = os.environ if environ is None else environ
        # Reentrant: public methods call each other, and a plugin that is loaded may use the registry.
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
        self._conflicts: dict[type, tuple[NameConflict, ...]] = {}

    def register(self, plugin: object, *, name: str | None = None) -> None:
        """Add a plugin of this process: a module or object with hook implementations.

        A single contribution, for example a backend, is accepted, too.

        Args:
            plugin: The plugin.
            name: Its name in messages; by default its own name.

        Raises:
            ContractError: The plugin breaks the hook contract.
            DuplicateNameError: A plugin of that name is there already, or a contribution has the name
                of another plugin's.
        """
        plugin, name = as_plugin(plugin, name)
        info = PluginInfo(name, name, "")
        with self._lock:
            self._discover()
            self._join(info, plugin)
            conflict = self._first_conflict(name)
            if conflict is not None:
                self._remove(name)
                raise DuplicateNameError(str(conflict))
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
            self._remove(name)

    def refresh(self) -> None:
        """Search for installed plugins again, for example after a ``pip install`` in a notebook.

        Raises:
            DuplicateNameError: A newly installed plugin has the name of one that this process registered.
        """
        with self._lock:
            registered = self._registered
            self._reset()
            self._discover()
            for info, plugin in registered:
                self._join(info, plugin)

    def backends(self) -> "tuple[Contribution[Backend[Any]], ...]":
        """Return the backends, sorted by name."""
        return self._collect(class_of("Backend"))

    def collate_adapters(self) -> "tuple[Contribution[CollateAdapter], ...]":
        """Return the collate adapters, sorted by name."""
        return self._collect(class_of("CollateAdapter"))

    def engines(self) -> "tuple[Contribution[Engine], ...]":
        """Return the engines, sorted by name."""
        return self._collect(class_of("Engine"))

    def commands(self) -> tuple[Contribution[Command], ...]:
        """Return the sub-commands of ``tp``, sorted by name."""
        return self._collect(Command)

    def callbacks(self) -> "tuple[Contribution[NamedCallback], ...]":
        """Return the callbacks for runs of training, sorted by name."""
        return self._collect(class_of("NamedCallback"))

    def loggers(self) -> "tuple[Contribution[LoggerFactory], ...]":
        """Return the factories of loggers, sorted by name."""
        return self._collect(class_of("LoggerFactory"))

    def plugins(self) -> tuple[PluginInfo, ...]:
        """Return the plugins that were loaded, sorted by name."""
        with self._lock:
            self._discover()
            return tuple(self._infos[name] for name in sorted(self._infos))

    def broken(self) -> tuple[BrokenPlugin, ...]:
        """Return the plugins that were left out, with the cause, sorted by name.

        It calls every hook first, so that a plugin that raises only then is listed, too.
        """
        with self._lock:
            for name in HOOKS:
                self._collect(class_of(name))
            return tuple(self._broken[name] for name in sorted(self._broken))

    def conflicts(self, kind: type | None = None) -> tuple[NameConflict, ...]:
        """Return the names that several plugins bring, and which plugins were left out.

        Args:
            kind: The class of the contributions, as `Backend` or `LoggerFactory`; ``None`` for all.
        """
        with self._lock:
            if kind is None:
                kinds = list(map(class_of, HOOKS))
            else:
                kinds = [kind]
            for each in kinds:
                self._collect(each)
            return tuple(conflict for each in kinds for conflict in self._conflicts[each])

    def contributions(self, plugin: str) -> dict[str, tuple[str, ...]]:
        """Return the names of a plugin's contributions by kind: ``{"backend": ("mine",)}``."""
        by_kind = {}
        for kind in map(class_of, HOOKS):
            answers: tuple[Contribution[Any], ...] = self._collect(kind)
            by_kind[word_of(kind)] = tuple(
                name_of(answer.item) for answer in answers if answer.plugin == plugin
            )
        return {word: names for word, names in by_kind.items() if names}

    def disabled(self) -> tuple[PluginInfo, ...]:
        """Return the plugins that ``TP_DISABLE_PLUGINS`` blocked, sorted by name."""
        with self._lock:
            self._discover()
            return tuple(self._disabled)

    def require(self, name: str) -> None:
        """Raise an error if ``name`` is missing because something was left out.

        Args:
            name: The name of a plugin or distribution, or of a contribution that was not found.

        Raises:
            PluginError: The plugin is broken, or it was blocked; the cause is chained.
            DuplicateNameError: Several plugins bring something of that name.
        """
        with self._lock:
            self._discover()
            for broken in self._broken.values():
                if name in {broken.info.name, broken.info.distribution}:
                    msg = f"{broken}; it was left out. The cause is above; {broken.remedy}"
                    raise PluginError(msg) from broken.error
            for info in self._disabled:
                if name in {info.name, info.distribution}:
                    msg = f"plugin {info} is blocked by {DISABLE_VARIABLE}; unset it to use {name!r}"
                    raise PluginError(msg)
            for conflicts in self._conflicts.values():
                for conflict in conflicts:
                    if conflict.name == name and conflict.kept is None:
                        raise DuplicateNameError(str(conflict))

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
                self._join(info, load(info, point))
            except KeyboardInterrupt:  # the user's, and no fault of the plugin
                self._reset()  # the next call searches again, and does not see half of the plugins
                raise
            except BaseException as error:  # noqa: BLE001 - a plugin may raise anything
                self._broken.setdefault(str(info), BrokenPlugin(info, error))

    def _join(self, info: PluginInfo, plugin: object) -> None:
        """Register ``plugin`` with pluggy, completely or, with an error, not at all."""
        other = self._infos.get(info.name)
        if other is not None:
            msg = (
                f"two plugins are called {info.name!r}: one of {other.distribution!r}, one of "
                f"{info.distribution!r}; uninstall one, or block it with {DISABLE_VARIABLE}"
            )
            raise DuplicateNameError(msg)
        declared = contract_of(plugin, info)
        check_hooks_marked(plugin, info)
        try:
            self._manager.register(plugin, name=info.name)
            self._manager.check_pending()
        except BaseException as error:
            # On any error: pluggy may have registered some of the hooks by then.
            self._manager.unregister(name=info.name)
            if not isinstance(error, pluggy.PluginValidationError):
                raise
            hooks = ", ".join(hook for hook, _ in HOOKS.values())
            msg = f"plugin {info} breaks the hook contract: {error}; the hooks are {hooks}"
            raise ContractError(msg) from error
        self._infos[info.name] = replace(info, contract=declared)
        self._forget_answers()

    def _remove(self, name: str) -> None:
        self._manager.unregister(name=name)
        del self._infos[name]
        self._forget_answers()

    def _forget_answers(self) -> None:
        self._cache.clear()
        self._conflicts.clear()

    def _collect(self, kind: type[T]) -> tuple[Contribution[T], ...]:
        with self._lock:
            self._discover()
            if kind not in self._cache:
                if kind is Command:
                    own = dict.fromkeys(OWN_COMMANDS, _TP_CORE)
                else:
                    own = {}
                resolved = resolve_conflicts(word_of(kind), self._ask(kind), own=own)
                self._cache[kind], self._conflicts[kind] = resolved
            return self._cache[kind]

    def _first_conflict(self, plugin: str) -> NameConflict | None:
        """Return the first conflict of a contribution of ``plugin`` with another plugin's."""
        for name, (hook, _) in HOOKS.items():
            callers = getattr(self._manager.hook, hook).get_hookimpls()
            if any(implementation.plugin_name == plugin for implementation in callers):
                for conflict in self.conflicts(class_of(name)):
                    if any(info.name == plugin for info in conflict.left_out):
                        return conflict
        return None

    def _ask(self, kind: type[T]) -> list[Contribution[T]]:
        # Each implementation is called separately: in pluggy's own call of all, one that raises would
        # discard the answers of the others.
        contributions: list[Contribution[T]] = []
        caller = getattr(self._manager.hook, hook_of(kind))
        for implementation in caller.get_hookimpls():
            info = self._infos[implementation.plugin_name]
            ask = partial(all_validated, implementation.function, kind, info)
            try:
                items = call(info, "asked", ask)
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # noqa: BLE001 - a plugin may raise anything
                self._broken.setdefault(str(info), BrokenPlugin(info, error))
                continue
            contributions += [
                Contribution(item, info.name, info.distribution, info.version) for item in items
            ]
        return contributions


registry = PluginRegistry()
"""The registry of this process."""
