"""The public surface is what the text of it says, and files of before are read as they were."""

import json
import math
import tarfile

import pytest

from tests.run_tp import run
from tests.surface.__main__ import differences, texts
from tests.surface.runs import BEFORE, RANKS, STOP, go_on, here, load_whole


def test_the_public_surface_changes_only_where_that_is_wanted():
    found = differences(texts())
    if found:
        pytest.fail(f"{found}\n\nIf wanted: python -m tests.surface --write, and CHANGELOG.md", pytrace=False)


def numbers(value):
    """Yield all numbers in a value, with what each is called."""
    if isinstance(value, (dict, list)):
        for key, below in value.items() if isinstance(value, dict) else enumerate(value):
            yield from ((f"{key}.{name}", number) for name, number in numbers(below))
    else:
        yield "", value


def assert_equal(found, expected, made):
    """Compare to the last bit where that is what made them, else closely."""
    exactly = made == here()
    found, expected = dict(numbers(found)), dict(numbers(expected))
    assert found.keys() == expected.keys()
    different = {
        name: (value, found[name])
        for name, value in expected.items()
        if (
            found[name] != value
            if exactly
            else not math.isclose(found[name], value, rel_tol=1e-6, abs_tol=1e-6)
        )
    }
    assert different == {}


def newest(folder):
    """Return the files of the newest checkpoint."""
    (checkpoint,) = folder.glob("step-*")
    return sorted(path.relative_to(checkpoint).as_posix() for path in checkpoint.rglob("*") if path.is_file())


@pytest.fixture
def unpacked(tmp_path):
    """Return the folder of a run of before, and the numbers that it had."""

    def unpack(kind):
        with tarfile.open(BEFORE / f"{kind}.tar.xz") as packed:
            packed.extractall(tmp_path, filter="data")
        return tmp_path / "run", json.loads((BEFORE / f"{kind}.json").read_text())

    return unpack


def kinds(*fast):
    """Return the kinds of runs; all but a few are for the slow part."""
    return [kind if kind in fast else pytest.param(kind, marks=pytest.mark.slow) for kind in RANKS]


@pytest.mark.parametrize("kind", kinds("rich", "stream", "shard"))
def test_a_run_of_before_goes_on_to_the_numbers_that_it_would_have_had(kind, unpacked):
    folder, before = unpacked(kind)
    files = newest(folder)
    assert_equal(go_on(kind, folder), before["ended"], before["made"])
    assert newest(folder) == files


@pytest.mark.parametrize("kind", kinds("rich", "shard"))
def test_what_a_run_of_before_left_is_read(kind, unpacked, capfd):
    folder, before = unpacked(kind)
    weights = before["stopped"]["weights"]
    converted = folder / "converted.safetensors"
    assert run(["convert", str(folder), str(converted)]) == 0
    assert run(["report", str(folder), "--out", str(folder / "page.html")]) == 0
    assert "val_loss" in (folder / "page.html").read_text()
    for path in (folder / f"step-{STOP:010}", folder / "model.safetensors", converted):
        assert load_whole(kind, path) == weights
    if kind == "shard":
        assert load_whole(kind, folder / "sharded") == weights
