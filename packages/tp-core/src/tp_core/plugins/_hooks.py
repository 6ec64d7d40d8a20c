"""The hooks of plugins and their markers, the kinds of contributions, their checks, and calls of plugins."""

import importlib
import inspect
import os
import re
import sys
import threading
import traceback as tracebacks
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Generic, TextIO, TypeVar, cast

import pluggy

from tp_core._first_party import FIRST_PARTY
from tp_core.arguments import check_call
from tp_core.errors import ContractError
from tp_core.output import print_to_stderr

if TYPE_CHECKING:
    from tp_core._contracts._backend import Backend
    from tp_core._contracts._callback import NamedCallback
    from tp_core._contracts._collate import CollateAdapter
    from tp_core._contracts._engine import Engine
    from tp_core._contracts._logger import LoggerFactory


PROJECT_NAME = "tp"

CONTRACT_VERSION = 1
"""The major version of the hook contracts. A plugin declares the one it was built for as
``tp_contract = 1``; a plugin for another one is left out, with a message."""

hookspec = pluggy.HookspecMarker(PROJECT_NAME)
hookimpl = pluggy.HookimplMarker(PROJECT_NAME)
"""The decorator of a plugin's implementations of the hooks in :class:`tp_core.discovery.HookSpecs`."""


# -- The hooks of plugins, the kinds of contributions, and their checks ---------------------------


DISABLE_VARIABLE = "TP_DISABLE_PLUGINS"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Contribution(Generic[T]):
    """One thing that a plugin brought.

    Attributes:
        item: The thing: a backend, an engine, a logger factory and so on.
        plugin: The name of the plugin.
        distribution: The distribution it is part of; for one that a script registered, its name.
        version: The version of that distribution; empty for one that a script registered.
    """

    item: T
    plugin: str
    distribution: str
    version: str


@dataclass(frozen=True, slots=True)
class PluginInfo:
    """A plugin that was found and loaded.

    Attributes:
        name: Its entry point's name, or the name it was registered under.
        distribution: The distribution it is part of; the name again for a registered one.
        version: The version of that distribution; empty for a registered one.
        contract: The version of the hook contract that it declares (``tp_contract``);
            ``None`` if it declares none, and before it is loaded.
    """

    name: str
    distribution: str
    version: str
    contract: int | None = None

    def __str__(self) -> str:
        origin = f"{self.distribution} {self.version}".rstrip()
        if origin == self.name:
            return self.name
        return f"{self.name} ({origin})"


@dataclass(frozen=True, slots=True)
class BrokenPlugin:
    """A plugin that was found and left out.

    Attributes:
        info: The plugin.
        error: The cause.
    """

    info: PluginInfo
    error: BaseException

    @property
    def remedy(self) -> str:
        """The advice to the user."""
        if isinstance(self.error, ModuleNotFoundError):
            missing = self.error.name
        else:
            missing = None
        if missing:
            first = f"install what brings the module {missing!r}"
        else:
            first = "update it or uninstall it"
        return f"{first}, or block it with TP_DISABLE_PLUGINS={self.info.name}"

    @property
    def traceback(self) -> str:
        """The traceback of the cause, as Python prints it."""
        return "".join(tracebacks.format_exception(self.error))

    def __str__(self) -> str:
        return f"plugin {self.info} is broken: {describe(self.error)}"


def describe(error: BaseException) -> str:
    """Return an error's type and message, also where its ``__str__`` raises another error."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception as other:  # noqa: BLE001 - a plugin may raise anything
        return f"{type(error).__name__} with a message that cannot be read ({type(other).__name__})"


OWN_COMMANDS = frozenset({"doctor", "explain"})
"""Sub-commands that `tp` has without any plugin; a plugin's command cannot have their names."""


@dataclass(frozen=True, slots=True)
class Command:
    """A sub-command of ``tp``.

    Attributes:
        name: The word after ``tp``.
        help: One line for ``tp --help``.
        load: Returns the command as a ``typer.Typer`` or a ``click.Command``; heavy imports happen
            in here.
    """

    name: str
    help: str
    load: Callable[[], Any]


class HookSpecs:
    """Every hook, all optional. A plugin module implements the ones it needs.

    Example:
        >>> from tp_core.plugins import hookimpl
        >>> @hookimpl
        ... def tp_backends():
        ...     from my_package.backend import MyBackend
        ...     return [MyBackend()]
    """

    @hookspec
    def tp_backends(self) -> "Iterable[Backend[Any]]":  # type: ignore[empty-body]  # a declaration
        """Return the backends that this plugin brings."""

    @hookspec
    def tp_collate_adapters(self) -> "Iterable[CollateAdapter]":  # type: ignore[empty-body]  # as above
        """Return the collate adapters that this plugin brings."""

    @hookspec
    def tp_engines(self) -> "Iterable[Engine]":  # type: ignore[empty-body]  # as above
        """Return the engines that this plugin brings."""

    @hookspec
    def tp_commands(self) -> Iterable[Command]:  # type: ignore[empty-body]  # as above
        """Return the sub-commands of ``tp`` that this plugin brings."""

    @hookspec
    def tp_callbacks(self) -> "Iterable[NamedCallback]":  # type: ignore[empty-body]  # as above
        """Return the callbacks that this plugin brings, for runs that name them or for all."""

    @hookspec
    def tp_loggers(self) -> "Iterable[LoggerFactory]":  # type: ignore[empty-body]  # as above
        """Return the factories of the loggers that this plugin brings."""


HOOKS: Mapping[str, tuple[str, str]] = {
    "Backend": ("tp_backends", "tp_core._contracts._backend"),
    "CollateAdapter": ("tp_collate_adapters", "tp_core._contracts._collate"),
    "Engine": ("tp_engines", "tp_core._contracts._engine"),
    "Command": ("tp_commands", "tp_core.plugins._hooks"),
    "NamedCallback": ("tp_callbacks", "tp_core._contracts._callback"),
    "LoggerFactory": ("tp_loggers", "tp_core._contracts._logger"),
}
"""The hook of each kind of contribution, and the module of its class: imported when it is first asked for."""

_WORDS = {"CollateAdapter": "collate adapter", "NamedCallback": "callback", "LoggerFactory": "logger"}


def hook_of(kind: type) -> str:
    return HOOKS[kind.__name__][0]


def word_of(kind: type) -> str:
    return _WORDS.get(kind.__name__, kind.__name__.lower())


def class_of(name: str) -> type:
    kind: type = getattr(importlib.import_module(HOOKS[name][1]), name)
    return kind


def as_plugin(plugin: object, name: str | None) -> tuple[object, str]:
    kinds = tuple(map(class_of, HOOKS))
    if isinstance(plugin, type) and issubclass(plugin, kinds):
        bare = _made(plugin)
    else:
        bare = plugin
    for kind in kinds:
        if isinstance(bare, kind):
            hook = hook_of(kind)
            implementation = hookimpl(specname=hook)(lambda: [bare])
            return SimpleNamespace(**{hook: implementation}), name or name_of(bare)
    return plugin, name or str(getattr(plugin, "__name__", type(plugin).__name__))


def _made(kind: type[T]) -> T:
    if missing := sorted(getattr(kind, "__abstractmethods__", ())):
        msg = f"the class {kind.__name__} needs the methods {', '.join(missing)}"
        raise ContractError(msg)
    return kind()


def all_validated(hook: Callable[[], Iterable[object]], kind: type[T], info: PluginInfo) -> list[T]:
    answer = hook()
    if not isinstance(answer, Iterable):
        is_single = isinstance(answer, kind) or (isinstance(answer, type) and issubclass(answer, kind))
        if is_single:
            got = f"the {word_of(kind)} itself"
        else:
            got = f"{type(answer).__name__}: {answer!r}"
        msg = f"{hook_of(kind)} of plugin {info} must return a list of {kind.__name__} objects, got {got}"
        raise ContractError(msg)
    return [validated(item, kind, info) for item in answer]


def validated(item: object, kind: type[T], info: PluginInfo) -> T:
    """Return a checked contribution; a class is instantiated."""
    if isinstance(item, type) and issubclass(item, kind):
        item = _made(item)
    if not isinstance(item, kind):
        msg = (
            f"{hook_of(kind)} of plugin {info} must return {kind.__name__} objects, "
            f"got {type(item).__name__}: {item!r}"
        )
        raise ContractError(msg)
    name = getattr(item, "name", None)
    if not isinstance(name, str) or not name or isinstance(getattr(type(item), "name", None), property):
        msg = (
            f"{kind.__name__} {type(item).__name__} of plugin {info} needs a name: a class "
            f"attribute `name` that is a string and not empty, and no property, got {name!r}"
        )
        raise ContractError(msg)
    hash(name)  # a subclass of str without a hash could not be a key
    text = getattr(item, "help", "")
    if not isinstance(text, str):
        msg = f"{kind.__name__} {name!r} of plugin {info} needs a help that is a string, got {text!r}"
        raise ContractError(msg)
    if isinstance(item, Command):
        _check_command(item, info)
    if info.distribution not in FIRST_PARTY:
        for method, contract in vars(kind).items():
            if inspect.isfunction(contract) and not method.startswith("_"):
                check_call(getattr(item, method), contract, of=f"{kind.__name__} {name!r} of plugin {info}")
    return item


def _check_command(command: Command, info: PluginInfo) -> None:
    if not re.fullmatch(r"[^\W_][\w.-]*", command.name):
        msg = (
            f"the command {command.name!r} of plugin {info} needs one word as its name: letters, digits, "
            "'-', '_' and '.', the first one a letter or a digit"
        )
        raise ContractError(msg)
    if not callable(command.load):
        msg = (
            f"the load of command {command.name!r} of plugin {info} must be a function, got {command.load!r}"
        )
        raise ContractError(msg)


def contract_of(plugin: object, info: PluginInfo) -> int | None:
    """Return the version of the hook contract that a plugin declares; ``None`` if it declares none."""
    declared: int | None = getattr(plugin, "tp_contract", None)
    if declared is not None and type(declared) is not int:
        msg = f"plugin {info} must declare tp_contract as a whole number, got {declared!r}"
        raise ContractError(msg)
    if declared not in {None, CONTRACT_VERSION}:
        msg = (
            f"plugin {info} was built for version {declared!r} of the hook contract, and this "
            f"tp-core has version {CONTRACT_VERSION}; install versions that match"
        )
        raise ContractError(msg)
    return declared


def check_hooks_marked(plugin: object, info: PluginInfo) -> None:
    """Check that each function named like a hook has the marker: pluggy silently ignores others."""
    for hook, _ in HOOKS.values():
        function = getattr(plugin, hook, None)
        if callable(function) and not hasattr(function, f"{PROJECT_NAME}_impl"):  # where pluggy looks
            msg = f"plugin {info} has a function {hook} that is no hook: decorate it with @hookimpl"
            raise ContractError(msg)


def name_of(item: object) -> str:
    name: str = item.name  # type: ignore[attr-defined]  # every kind of contribution has one
    return name


# -- Calls of plugins: their output goes to stderr, and a slow one is reported --------------------


PATIENCE_S = 10.0
"""Seconds after which a plugin that is still being loaded or asked is reported on stderr."""


def call(info: PluginInfo, doing: str, function: Callable[[], T]) -> T:
    """Call a function of a plugin, with its output sent to stderr.

    A slow one is reported on stderr, with the variable that leaves the plugin out.
    """
    if info.distribution in FIRST_PARTY:  # those of this project print nothing
        return function()
    timer = threading.Timer(PATIENCE_S, _warn_slow, (info, doing))
    timer.daemon = True  # a plugin that never returns must not keep the program from ending
    timer.start()
    try:
        with stdout_to_stderr():
            return function()
    finally:
        timer.cancel()


def _warn_slow(info: PluginInfo, doing: str) -> None:
    print_to_stderr(
        f"tp: plugin {info} has been {doing} for {PATIENCE_S:g} s; {DISABLE_VARIABLE}={info.name} leaves "
        "it out"
    )


# Both the stream and the descriptor are the process's, and several threads may redirect them at once: the
# first one in redirects, the last one out restores. Without the lock and the count, a thread that leaves
# early would send another's output to stdout, and one that leaves late would keep stdout redirected.
_lock = threading.Lock()
_inside = 0  # threads in the block
_stream: TextIO | None = None  # the real sys.stdout, while redirected
_descriptor: int | None = None  # a copy of descriptor 1, while redirected


@contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Redirect stdout to stderr in a block: other programs may parse stdout, as with ``--json``.

    It redirects Python's stream, and the descriptor that C libraries and child processes write to.
    """
    global _inside  # noqa: PLW0603 - stdout is the process's
    with _lock:
        if not _inside:
            _redirect()
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside:
                _restore()


def _redirect() -> None:
    global _stream, _descriptor  # noqa: PLW0603 - as above
    _stream, sys.stdout = sys.stdout, sys.stderr
    if sys.__stdout__ is None:  # it was closed, and its number may be a file's
        return
    with suppress(OSError):  # descriptor 1 is closed, or there is none left: the stream alone
        _flush()
        _descriptor = os.dup(1)
        try:
            os.dup2(2, 1)
        except OSError:
            os.close(_descriptor)
            _descriptor = None


def _restore() -> None:
    global _stream, _descriptor  # noqa: PLW0603 - as above
    if _descriptor is not None:
        _flush()
        os.dup2(_descriptor, 1)
        os.close(_descriptor)
        _descriptor = None
    sys.stdout, _stream = cast("TextIO", _stream), None  # or ``None``, where the program has none


def _flush() -> None:
    """Flush the buffers of Python and the C library, before the descriptor points elsewhere."""
    with suppress(OSError, ValueError):
        if sys.__stdout__ is not None:
            sys.__stdout__.flush()
    with suppress(OSError, TypeError, AttributeError, ImportError):
        import ctypes

        ctypes.CDLL(None).fflush(None)
