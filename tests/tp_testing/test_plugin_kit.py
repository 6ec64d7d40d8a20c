"""The conformance kit of plugin modules passes a good one, and notices each way to be wrong."""

import os
import sys

import pytest
from tp_testing import PluginConformance, fake_distribution

GOOD = """
    from tp_core.plugins import Command, hookimpl

    tp_contract = 1

    def load():
        return None

    @hookimpl
    def tp_commands():
        return [Command("kit-under-test", "Do nothing.", load)]
"""


class Kit(PluginConformance):
    plugin = "kit_plugin"
    brings = {"command": ("kit-under-test",)}


def check(folder, monkeypatch, test, source, *, entry="kit_plugin"):
    with fake_distribution(
        folder, "tp-kit", entry_points={"kit": entry}, modules={"kit_plugin": source, "other": GOOD}
    ) as place:
        path = os.pathsep.join([str(place), *filter(None, [os.environ.get("PYTHONPATH")])])
        monkeypatch.setenv("PYTHONPATH", path)  # for the process that imports it anew
        sys.modules.pop("kit_plugin", None)
        getattr(Kit(), test)()


ALTERED = [
    ("test_it_declares_its_contract_version", ("tp_contract = 1", "")),
    ("test_it_declares_its_contract_version", ("tp_contract = 1", "tp_contract = 2")),
    ("test_it_brings_what_it_is_for", ("kit-under-test", "another")),
    ("test_it_brings_what_it_is_for", ("kit-under-test", "doctor")),
    ("test_it_brings_what_it_is_for", ("return [Command", "1 / 0; [Command")),
    ("test_it_brings_what_it_is_for", ("def tp_commands", "def tp_comands")),
    (
        "test_it_brings_the_same_when_it_is_asked_again",
        ("return [Command", "globals().setdefault('n', []).append(1); return len(n) % 2 * [Command"),
    ),
]


@pytest.mark.parametrize(("test", "change"), ALTERED)
def test_an_altered_plugin_is_caught(test, change, tmp_path, monkeypatch):
    check(tmp_path / "good", monkeypatch, test, GOOD)
    with pytest.raises(AssertionError):
        check(tmp_path / "altered", monkeypatch, test, GOOD.replace(*change))


IMPORTING = [
    ("", None),
    ("import torch", "it imports torch, numpy"),
    ("import typer", "it imports typer"),
    ("print('here I am')", "it prints while it is imported: 'here I am"),
    ("import os; os.write(1, b'here I am')", "it prints while it is imported: 'here I am"),
    ("import os; os.environ['OMP_NUM_THREADS'] = '3'", "it changes the environment variable OMP_NUM_THREADS"),
    ("import logging; logging.basicConfig(level=10)", "it changes the root logger while it is imported"),
    (
        "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()",
        "it starts threads",
    ),
    ("raise ImportError('no such library')", "no such library"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("line", "message"), IMPORTING)
def test_a_plugin_that_is_heavy_or_loud_when_it_is_imported_is_caught(line, message, tmp_path, monkeypatch):
    source = GOOD.replace("tp_contract = 1", f"tp_contract = 1\n    {line}")
    arguments = (tmp_path, monkeypatch, "test_importing_it_is_light_and_quiet", source)
    if message is None:
        check(*arguments)
        return
    with pytest.raises(AssertionError, match=message):
        check(*arguments)


def test_a_plugin_that_no_distribution_names_is_caught(tmp_path, monkeypatch):
    test = "test_an_installed_distribution_names_it"
    check(tmp_path / "good", monkeypatch, test, GOOD)
    with pytest.raises(AssertionError, match="no installed distribution has 'kit_plugin'"):
        check(tmp_path / "altered", monkeypatch, test, GOOD, entry="other")
