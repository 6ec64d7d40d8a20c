"""The map of the house names files that are there."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "ARCHITECTURE.md").read_text()
HOMES = {
    f"tp_{name.replace('-', '_')}": ROOT / "packages" / f"tp-{name}" / "src"
    for name in ("core", "tuple", "dp-gather", "shard", "runner", "trainer")
}


def places():
    """Every path with a package's name in it, wherever it stands in the text."""
    names = re.findall(r"\b(tp_(?:core|tuple|dp_gather|shard|runner|trainer)/[\w/]*(?:\.py)?)", TEXT)
    return sorted(set(names))


def test_the_map_names_many_places():
    assert len(places()) > 25


def test_every_place_is_there():
    missing = [name for name in places() if not (HOMES[name.split("/")[0]] / name).exists()]
    assert missing == []


def test_every_room_is_on_the_map():
    for package in ("tp_core", "tp_trainer", "tp_runner", "tp_shard"):
        rooms = [p.parent.name for p in (HOMES[package] / package).glob("*/__init__.py")]
        missing = [room for room in rooms if f"{room}/" not in TEXT and f"{room}." not in TEXT]
        assert missing == [], package
