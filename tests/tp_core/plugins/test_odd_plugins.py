"""Plugins that misbehave while they are loaded or asked: each costs itself alone."""

import gc
import json
import os
import signal
import sys
import threading

import pytest
from tp_core import LaunchEnvironment, resolve_devices

# Private: two threads that redirect at once, and how long a plugin may take.
from tp_core.discovery import PluginRegistry, select
from tp_core.plugins import Job, _hooks  # private: plugins that take seconds would cost each run

from tests.run_tp import doctor, run, seen
from tests.tp_core.plugins.odd import odd, source


def job():
    return Job(devices=resolve_devices("cpu"), environment=LaunchEnvironment.read({}))


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
def test_what_a_plugin_prints_by_whatever_way_never_reaches_stdout(how, when, tmp_path, capfd):
    with seen(odd(tmp_path, source(**{when: PRINTS[how]}))):
        assert run(["doctor", "--ranks", "0", "--json"]) == 0
    captured = capfd.readouterr()
    assert json.loads(captured.out)["problems"] == []
    assert "NOISE" in captured.err


def test_stdout_is_what_it_was_after_several_were_quiet_at_once(capfd):
    inside, leave, stdout = threading.Event(), threading.Event(), sys.stdout

    def other():
        with _hooks.stdout_to_stderr():
            inside.set()
            assert leave.wait(60)

    thread = threading.Thread(target=other)
    with _hooks.stdout_to_stderr():
        thread.start()
        assert inside.wait(60)
        os.write(1, b"within")
    os.write(1, b"still within")
    leave.set()
    thread.join(60)
    os.write(1, b"after")
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("after", "withinstill within")
    assert sys.stdout is stdout


# -- what it raises, and when it does not end -----------------------------------------------------


@pytest.mark.parametrize(
    ("error", "when"),
    [
        ("SystemExit(0)", "loaded"),
        ("SystemExit(0)", "asked"),
        ("GeneratorExit", "hooked"),
    ],
)
def test_a_plugin_may_raise_what_ends_programs(error, when, tmp_path):
    with seen(odd(tmp_path, source(**{when: f"raise {error}"}))):
        report = doctor()
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
    tell = _hooks._warn_slow

    def telling(*arguments):
        tell(*arguments)
        come.set()

    monkeypatch.setattr(_hooks, "PATIENCE_S", 0.01)
    monkeypatch.setattr(_hooks, "_warn_slow", telling)
    monkeypatch.setattr(gc, "wait_until_told", lambda: come.wait(60), raising=False)
    with odd(tmp_path, source(loaded="import gc; assert gc.wait_until_told()")):
        PluginRegistry(environ={}).backends()
    words = "plugin odd (acme-odd 0.1) has been loaded for 0.01 s; TP_DISABLE_PLUGINS=odd leaves it out"
    assert words in capfd.readouterr().err


def test_a_backend_that_never_answers_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.setattr("tp_core.plugins._select.DEADLINE_S", 0.1)
    with seen(odd(tmp_path, source(asked="import threading; threading.Event().wait()"))):
        report = doctor()
    assert report["backend"] == "single"
    (problem,) = report["problems"]
    assert "backend odd of acme-odd: assess() raised TimeoutError: it had no answer after 0.1 s" in problem
