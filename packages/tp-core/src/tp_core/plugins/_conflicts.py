"""Several plugins that bring the same name: which keeps it, and which are left out."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from tp_core.plugins._contribution import Contribution, PluginInfo

__all__ = ["DISABLE_VARIABLE", "FIRST_PARTY", "NameConflict", "settle"]

FIRST_PARTY = frozenset({"tp-core", "tp-dp-gather", "tp-runner", "tp-shard", "tp-trainer", "tp-tuple"})
"""The distributions of this project: another one that is installed does not take a name from them."""

DISABLE_VARIABLE = "TP_DISABLE_PLUGINS"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class NameConflict:
    """Several plugins bring something of one kind under one name: two backends, say.

    What else they bring is not concerned. ``str()`` of it is the message for people.

    Attributes:
        kind: What they bring, for messages: "backend".
        name: The name.
        kept: The plugin of this project whose one has the name; ``None`` if none has it.
        left_out: The plugins whose ones were left out.
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
                f"that name; give that of {theirs} another name, uninstall it, or block it with {blocks}"
            )
        return (
            f"{len(self.left_out)} {self.kind}s are called {self.name!r}, of the plugins {theirs}, and all "
            f"of them are left out; uninstall one, or block its plugin with {blocks}"
        )


def settle(
    kind: str, found: Iterable[Contribution[T]], *, own: Mapping[str, PluginInfo]
) -> tuple[tuple[Contribution[T], ...], tuple[NameConflict, ...]]:
    """Return what keeps its name, sorted by name, and the names that several want.

    A plugin of this project keeps its name. Between others the choice would be arbitrary: none gets it.

    Args:
        kind: What they are, for messages.
        found: What the plugins bring.
        own: Names that are taken by what no plugin brings, and by whom.
    """
    by_name: dict[str, list[Contribution[Any]]] = {}
    for contribution in found:
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
        owner = own.get(name) if first_party is None else _info(first_party)
        conflicts.append(NameConflict(kind, name, owner, left_out))
    return tuple(kept), tuple(conflicts)


def _info(contribution: Contribution[Any]) -> PluginInfo:
    return PluginInfo(contribution.plugin, contribution.distribution, contribution.version)
