"""What plugins brought, and where it came from."""

import traceback as tracebacks
from dataclasses import dataclass
from typing import Generic, TypeVar

__all__ = ["BrokenPlugin", "Contribution", "PluginInfo", "describe"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Contribution(Generic[T]):
    """One thing that a plugin brought.

    Attributes:
        item: What it is: a backend, an engine, a logger factory and so on.
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
            ``None`` if it does not say, and before it is loaded.
        changed: Settings of the process that it changed while it was loaded or asked, in words; they were
            put back.
    """

    name: str
    distribution: str
    version: str
    contract: int | None = None
    changed: tuple[str, ...] = ()

    def __str__(self) -> str:
        origin = f"{self.distribution} {self.version}".rstrip()
        return self.name if origin == self.name else f"{self.name} ({origin})"


@dataclass(frozen=True, slots=True)
class BrokenPlugin:
    """A plugin that was found and left out.

    Attributes:
        info: Which one.
        error: Why.
    """

    info: PluginInfo
    error: BaseException

    @property
    def remedy(self) -> str:
        """What to do about it."""
        missing = self.error.name if isinstance(self.error, ModuleNotFoundError) else None
        first = f"install what brings the module {missing!r}" if missing else "update it or uninstall it"
        return f"{first}, or block it with TP_DISABLE_PLUGINS={self.info.name}"

    @property
    def traceback(self) -> str:
        """The whole story, as Python prints it."""
        return "".join(tracebacks.format_exception(self.error))

    def __str__(self) -> str:
        return f"plugin {self.info} is broken: {describe(self.error)}"


def describe(error: BaseException) -> str:
    """Return an error's type and message, also where asking for the message raises another one."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception as other:  # noqa: BLE001 - a plugin may raise anything
        return f"{type(error).__name__}, whose message cannot be read ({type(other).__name__})"
