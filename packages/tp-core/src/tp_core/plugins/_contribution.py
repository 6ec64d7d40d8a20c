"""What plugins brought, and where it came from."""

from dataclasses import dataclass
from typing import Generic, TypeVar

__all__ = ["BrokenPlugin", "Contribution", "PluginInfo"]

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
    """

    name: str
    distribution: str
    version: str
    contract: int | None = None

    def __str__(self) -> str:
        origin = f"{self.distribution} {self.version}".rstrip()
        return self.name if origin == self.name else f"{self.name} ({origin})"


@dataclass(frozen=True, slots=True)
class BrokenPlugin:
    """A plugin that was found and left out.

    Attributes:
        info: Which one.
        error: Why.
        traceback: The whole story, as Python prints it.
    """

    info: PluginInfo
    error: BaseException
    traceback: str

    def __str__(self) -> str:
        return f"plugin {self.info} is broken: {type(self.error).__name__}: {self.error}"
