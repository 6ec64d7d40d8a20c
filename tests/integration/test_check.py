"""`hatch run test`: checks that run beside the tests count as they do."""

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "tools" / "check.py"
HATCH = """
[envs.default.scripts]
types = "echo wrong types && exit {types}"
imports = "echo fine imports && exit {imports}"
unit = "echo tests {{args}} && exit {unit}"
"""


@pytest.fixture
def check():
    spec = importlib.util.spec_from_file_location("check", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("exits", "status"),
    [
        ({"types": 0, "imports": 0, "unit": 0}, 0),
        ({"types": 3, "imports": 0, "unit": 0}, 3),
        ({"types": 0, "imports": 4, "unit": 0}, 4),
        ({"types": 3, "imports": 0, "unit": 5}, 5),
    ],
)
def test_all_of_it_runs_and_whatever_fails_is_the_exit_status(check, exits, status, tmp_path, capfd):
    (tmp_path / "hatch.toml").write_text(HATCH.format(**exits))
    check.ROOT = tmp_path
    assert check.main(["--reruns", "1"]) == status
    printed = capfd.readouterr().out
    assert "tests --reruns 1" in printed
    assert "wrong types" in printed
    assert "fine imports" in printed
