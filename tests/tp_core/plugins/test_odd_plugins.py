"""Plugins that misbehave while they are loaded or asked: each costs itself alone, and changes nothing."""

import gc
import json
import os
import signal
import subprocess
import sys
import threading
from textwrap import dedent

import pytest
from tp_core import LaunchEnvironment, resolve_devices
from tp_core.cli._doctor import examine
from tp_core.cli._main import run
from tp_core.plugins import Job, PluginRegistry
from tp_core.plugins import _apart as apart_module
from tp_core.plugins import _select as select_module
from tp_core.plugins._select import select
from tp_core.plugins._settings import read_settings, restore_settings

from tests.tp_core.plugins.odd import odd, source


def job():
    return Job(devices=resolve_devices("cpu"), environment=LaunchEnvironment.read({}))


# -- what it changes is put back, and told --------------------------------------------------------

CHANGES = {
    "the current folder": "import os; os.chdir('/')",
    "garbage collection": "import gc; gc.disable()",
    "sys.excepthook": "import sys; sys.excepthook = print",
    "sys.stderr": "import io, sys; sys.stderr = io.StringIO()",
    "threading.excepthook": "import threading; threading.excepthook = print",
    "the root logger": "import logging; logging.basicConfig(level=0, force=True)",
    "the environment variable OMP_NUM_THREADS": "import os; os.environ['OMP_NUM_THREADS'] = '17'",
    "multiprocessing's start method": (
        "import multiprocessing; multiprocessing.set_start_method('spawn', force=True)"
    ),
    "Python's random generator": "import random; random.seed(1)",
    "torch's random generator": "import torch; torch.manual_seed(1)",
    "torch's default type": "import torch; torch.set_default_dtype(torch.float64)",
    "torch's default device": "import torch; torch.set_default_device('meta')",
    "the mode of gradients": "import torch; torch.set_grad_enabled(False)",
    "torch's number of threads": "import torch; torch.set_num_threads(torch.get_num_threads() + 1)",
    "torch's choice of deterministic algorithms": (
        "import torch; torch._C._set_deterministic_algorithms(True, warn_only=False)"  # as it does, at once
    ),
    "the handler of SIGTERM": "import signal; signal.signal(signal.SIGTERM, lambda *_: None)",
    "the handler of SIGINT": "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)",
    "torch's process group": (
        "import torch.distributed as dist; "
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)"
    ),
}
OF_A_THREAD = {  # assess() is asked on a thread of its own, whose own they are, or which cannot do it
    "torch's default device",
    "the mode of gradients",
    "torch's number of threads",
    "the handler of SIGTERM",
    "the handler of SIGINT",
}


@pytest.mark.parametrize(
    ("what", "when"), [*((what, "loaded") for what in CHANGES), ("the current folder", "hooked")]
)
def test_what_a_plugin_changes_is_put_back_and_told(what, when, tmp_path):
    before = read_settings()
    with odd(tmp_path, source(**{when: CHANGES[what]})):
        plugins = PluginRegistry(environ={})
        assert "odd" in [c.item.name for c in plugins.backends()]
        (info,) = [p for p in plugins.plugins() if p.name == "odd"]
    assert what in info.changed
    assert restore_settings(before) == []


def test_the_doctor_says_what_plugins_have_changed(tmp_path):
    with odd(tmp_path, source(loaded=CHANGES["the current folder"], asked=CHANGES["garbage collection"])):
        notes = examine(PluginRegistry(environ={}))["notes"]
    (loaded,) = [n for n in notes if "plugin odd (acme-odd 0.1) changed the current folder while" in n]
    (asked,) = [n for n in notes if "backend odd of acme-odd 0.1: assess() changed garbage collection" in n]
    assert "belongs into open()" in loaded
    assert "belongs into open()" in asked


@pytest.mark.parametrize("what", sorted(CHANGES.keys() - OF_A_THREAD))
def test_what_assess_changes_is_put_back_and_told(what, tmp_path):
    before = read_settings()
    with odd(tmp_path, source(asked=CHANGES[what])):
        plugins = PluginRegistry(environ={})
        candidates = select(job(), plugins.backends()).candidates
    (found,) = [c for c in candidates if c.name == "odd"]
    assert what in found.changed
    assert restore_settings(before) == []


def test_a_plugin_that_changes_nothing_is_said_to_have_changed_nothing(tmp_path):
    with odd(tmp_path, source(loaded="import torch, numpy, logging")):
        plugins = PluginRegistry(environ={})
        plugins.backends()
        assert [p.changed for p in plugins.plugins()] == [()] * len(plugins.plugins())


FIRST_IMPORT = """
    import sys
    from tp_core.plugins import PluginRegistry

    assert "torch" not in sys.modules
    plugins = PluginRegistry(environ={"TP_DISABLE_PLUGINS": ""})
    (info,) = [p for p in plugins.plugins() if p.name == "odd"]
    import torch
    print(info.changed, torch.get_default_dtype())
"""


@pytest.mark.parametrize(
    "does", [pytest.param("", marks=pytest.mark.slow), "torch.set_default_dtype(torch.float64)"]
)
def test_a_plugin_that_imports_torch_first_leaves_it_as_it_comes(does, tmp_path):
    with odd(tmp_path, source(loaded=f"import torch; {does}")):
        done = subprocess.run(
            [sys.executable, "-c", dedent(FIRST_IMPORT)],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": str(tmp_path / "acme-odd")},
            timeout=300,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    changed = ("torch's default type",) if does else ()
    assert done.stdout.strip() == f"{changed} torch.float32"


# -- what it prints -------------------------------------------------------------------------------

PRINTS = {
    "print": "print('NOISE')",
    "sys.__stdout__": "import sys; sys.__stdout__.write('NOISE')",
    "os.write": "import os; os.write(1, b'NOISE')",
    "a child": "import subprocess; subprocess.run(['echo', 'NOISE'], check=True)",
    "the C library": "import ctypes; ctypes.CDLL(None).printf(b'NOISE')",
}


@pytest.mark.parametrize(
    ("how", "when"), [*((how, "loaded") for how in PRINTS), ("os.write", "hooked"), ("os.write", "asked")]
)
def test_what_a_plugin_prints_by_whatever_way_never_reaches_stdout(how, when, tmp_path, capfd, monkeypatch):
    with odd(tmp_path, source(**{when: PRINTS[how]})):
        monkeypatch.setattr("tp_core.cli._doctor.registry", PluginRegistry(environ={}))
        assert run(["doctor", "--no-measure", "--json"]) == 0
    captured = capfd.readouterr()
    assert json.loads(captured.out)["problems"] == []
    assert "NOISE" in captured.err


def test_stdout_is_what_it_was_after_several_were_quiet_at_once(capfd):
    inside, leave = threading.Event(), threading.Event()

    def other():
        with apart_module.quiet():
            inside.set()
            assert leave.wait(60)

    thread = threading.Thread(target=other)
    with apart_module.quiet():
        thread.start()
        assert inside.wait(60)
        os.write(1, b"within")
    os.write(1, b"still within")
    leave.set()
    thread.join(60)
    os.write(1, b"after")
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("after", "withinstill within")


# -- what it raises, and when it does not end -----------------------------------------------------


@pytest.mark.parametrize(
    ("error", "when"),
    [
        ("KeyboardInterrupt", "loaded"),
        ("KeyboardInterrupt", "hooked"),
        ("KeyboardInterrupt", "asked"),
        ("SystemExit(0)", "asked"),
        ("GeneratorExit", "hooked"),
    ],
)
def test_a_plugin_may_raise_what_ends_programs(error, when, tmp_path):
    with odd(tmp_path, source(**{when: f"raise {error}"})):
        report = examine(PluginRegistry(environ={}))
    (problem,) = report["problems"]
    assert error.partition("(")[0] in problem
    assert "acme-odd" in problem
    assert "block it with TP_DISABLE_PLUGINS=" in problem
    assert "odd" not in report["backend"]


@pytest.mark.parametrize("when", ["loaded", "hooked", "asked"])
def test_the_users_own_interruption_ends_the_question(when, tmp_path):
    interrupt = "import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(60)"
    with odd(tmp_path, source(**{when: interrupt})):
        plugins = PluginRegistry(environ={})
        with pytest.raises(KeyboardInterrupt):
            select(job(), plugins.backends())
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_plugin_that_takes_long_is_named_with_what_leaves_it_out(tmp_path, monkeypatch, capfd):
    come = threading.Event()
    tell = apart_module._tell

    def telling(*arguments):
        tell(*arguments)
        come.set()

    monkeypatch.setattr(apart_module, "PATIENCE_S", 0.01)
    monkeypatch.setattr(apart_module, "_tell", telling)
    monkeypatch.setattr(gc, "wait_until_told", lambda: come.wait(60), raising=False)
    with odd(tmp_path, source(loaded="import gc; assert gc.wait_until_told()")):
        PluginRegistry(environ={}).backends()
    words = "plugin odd (acme-odd 0.1) has been loaded for 0.01 s; TP_DISABLE_PLUGINS=odd leaves it out"
    assert words in capfd.readouterr().err


def test_a_backend_that_never_answers_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(select_module, "DEADLINE_S", 0.1)
    with odd(tmp_path, source(asked="import threading; threading.Event().wait()")):
        report = examine(PluginRegistry(environ={}))
    assert report["backend"] == "single"
    (problem,) = report["problems"]
    assert "backend odd of acme-odd: assess() raised TimeoutError: it had no answer after 0.1 s" in problem
