"""Finding plugins among the installed distributions."""

import re
from collections.abc import Iterator
from importlib.metadata import EntryPoint, distributions, entry_points

from tp_core.errors import ContractError
from tp_core.plugins._apart import call
from tp_core.plugins._conflicts import FIRST_PARTY
from tp_core.plugins._contribution import PluginInfo

__all__ = ["ENTRY_POINT_GROUP", "KEYWORD", "find_entry_points", "find_forgotten", "load"]

ENTRY_POINT_GROUP = "tp.plugins"
"""The group of entry points by which installed plugins are found."""

KEYWORD = "tp-plugin"
"""What distributions with plugins have among their keywords, so that people find them."""


def find_entry_points() -> Iterator[tuple[PluginInfo, EntryPoint | Exception]]:
    """Yield every installed plugin's entry point, sorted, without importing any.

    The order is that of names and not of the file system, so that every machine sees the same. Those
    of this project come first: of two plugins with one name the second is left out. A distribution
    whose files cannot be read gives what was raised.
    """
    try:
        found: list[tuple[PluginInfo, EntryPoint | Exception]] = [
            _with_info(point) for point in entry_points(group=ENTRY_POINT_GROUP)
        ]
    except Exception:  # noqa: BLE001 - one distribution's files are damaged: whose?
        found = list(_one_by_one())
    yield from sorted(found, key=_order)


def _with_info(point: EntryPoint) -> tuple[PluginInfo, EntryPoint]:
    distribution = point.dist
    name = distribution.name if distribution is not None else point.name
    version = distribution.version if distribution is not None else ""
    return PluginInfo(point.name, name or point.name, version or ""), point


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


def _order(found: tuple[PluginInfo, EntryPoint | Exception]) -> tuple[bool, str, str]:
    info, _ = found
    return info.distribution not in FIRST_PARTY, info.name, info.distribution


def load(info: PluginInfo, point: EntryPoint | Exception) -> tuple[object, tuple[str, ...]]:
    """Import a plugin; return it with the words for settings of the process that it changed.

    Raises:
        ContractError: The entry point names nothing that could be imported.
        ProgramStopError: A signal handler of the program raised meanwhile.
        BaseException: What the plugin raised, or its distribution's files.
    """
    if isinstance(point, Exception):
        raise point
    if not point.pattern.match(point.value):
        msg = f"its entry point must be 'module' or 'module:attribute', got {point.value!r}"
        raise ContractError(msg)
    return call(info, "loaded", point.load)


def find_forgotten() -> list[str]:
    """Return the distributions that call themselves plugins, by their keyword, and name no module."""
    return sorted(
        distribution.name
        for distribution in distributions()
        if KEYWORD in re.split(r"[,\s]+", ",".join(distribution.metadata.get_all("Keywords", [])))
        and not distribution.entry_points.select(group=ENTRY_POINT_GROUP)
    )
