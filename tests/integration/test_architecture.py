"""ARCHITECTURE.md names files that are there, and the folders of tests mirror those of the packages."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "ARCHITECTURE.md").read_text()
HOMES = {
    f"tp_{name.replace('-', '_')}": ROOT / "packages" / f"tp-{name}" / "src"
    for name in ("context", "core", "launch", "tuple", "dp-gather", "shard", "runner", "trainer")
}


def places():
    """Every path with a package's name in it, wherever it stands in the text; those of tests are not."""
    names = re.findall(
        r"(?<!tests/)\b(tp_(?:context|core|launch|tuple|dp_gather|shard|runner|trainer)/[\w/]*(?:\.py)?)",
        TEXT,
    )
    return sorted(set(names))


def test_it_names_many_places():
    assert len(places()) > 25


def test_every_place_is_there():
    missing = [name for name in places() if not (HOMES[name.split("/")[0]] / name).exists()]
    assert missing == []


def test_every_folder_of_tests_on_the_map_is_there():
    names = [name for name in re.findall(r"`(tests/[\w/]+(?:\.py)?)`", TEXT) if "NAME" not in name]
    assert len(names) > 4
    assert [name for name in names if not (ROOT / name).exists()] == []


def test_every_folder_of_a_package_has_a_folder_of_tests():
    elsewhere = {
        "fully_sharded": "tested through the backend fsdp",
        "modules": "tested through what is made of them: units, stages, split layers",
    }
    for package in ("tp_core", "tp_trainer", "tp_runner", "tp_shard"):
        folders = {p.parent.name for p in (HOMES[package] / package).glob("*/__init__.py")} - set(elsewhere)
        tested = {
            p.parent.relative_to(ROOT / "tests" / package).parts[0]
            for p in (ROOT / "tests" / package).glob("*/**/test_*.py")
        }
        assert {folder.removeprefix("_") for folder in folders} - tested == set(), package
