"""How the devices come into a process, and the extension into the cache."""

import os
import subprocess
import sys
import sysconfig

import pytest
import torch
import tp_simulator
from tp_simulator import (
    _autoload,
    _build,
)  # private: no other door leads to what torch calls, or to the compiler


def _compiled(monkeypatch, folder, compiler):
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    monkeypatch.setenv("CXX", compiler)
    return _build.extension.__wrapped__()


def test_without_a_compiler_a_sentence_says_what_to_install(monkeypatch, tmp_path):
    with pytest.raises(
        tp_simulator.BuildError, match=r"the compiler that CXX names, 'none', is not here. Install one"
    ):
        _compiled(monkeypatch, tmp_path, "none")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        tp_simulator.BuildError, match=r"there is no C\+\+ compiler here. Install one .`apt install g"
    ):
        _compiled(monkeypatch, tmp_path, "")


def test_without_headers_of_python_a_sentence_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    with pytest.raises(
        tp_simulator.BuildError, match=r"the headers of Python are not in .*apt install python3-dev"
    ):
        _compiled(monkeypatch, tmp_path, "true")


def test_another_system_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(tp_simulator.BuildError, match=r"as Linux does it, and cannot run on win32"):
        _compiled(monkeypatch, tmp_path, "true")


def test_what_the_compiler_says_is_passed_on(monkeypatch, tmp_path):
    compiler = tmp_path / "cxx"
    compiler.write_text("#!/bin/sh\necho 'fatal: no space left' >&2\nexit 1\n")
    compiler.chmod(0o755)
    with pytest.raises(
        tp_simulator.BuildError, match=r"could not compile its extension: .*\nfatal: no space left"
    ):
        _compiled(monkeypatch, tmp_path, str(compiler))


def test_the_environment_decides_whether_there_are_devices(monkeypatch):
    for nothing in ("", "0"):
        monkeypatch.setenv("SIM_DEVICES", nothing)
        _autoload.autoload()
    monkeypatch.setenv("SIM_DEVICES", "two")
    with pytest.raises(
        ValueError, match=r"SIM_DEVICES is the number of simulated devices, such as 2, and not 'two'"
    ):
        _autoload.autoload()


def test_a_name_that_is_not_there_is_refused():
    assert tp_simulator.__version__
    with pytest.raises(AttributeError, match=r"has no attribute 'devices'"):
        _ = tp_simulator.devices


STARTED = """
import subprocess, sys, torch, tp_simulator
tp_simulator.activate(3)
print(torch.accelerator.current_accelerator(), torch.accelerator.device_count(), flush=True)
subprocess.run([sys.executable, "-c", "import torch; print(torch.sim.device_count())"], check=True)
"""


def _printed(program, **variables):
    environment = {k: v for k, v in os.environ.items() if k != "SIM_DEVICES"} | variables
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=800)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_nothing_happens_to_a_process_that_did_not_ask():
    assert "SIM_DEVICES" not in os.environ
    assert not hasattr(torch, "sim")
    assert "tp_simulator._torch_sim" not in sys.modules


@pytest.mark.slow
def test_a_process_that_activates_devices_passes_them_on():
    assert _printed(STARTED) == ["sim", "3", "3"]


@pytest.mark.slow
def test_of_several_processes_one_compiles(tmp_path):
    """The compiler is a program that notes its call, and hands out the extension that was built before."""
    built = _build._cache_folder() / _build._key() / f"{_build.NAME}.so"
    _printed("import torch", SIM_DEVICES="1")
    compiler = tmp_path / "cxx"
    compiler.write_text(
        f"#!/bin/sh\necho called >> {tmp_path}/calls\nsleep 1\n"
        f'while [ "$1" != -o ]; do shift; done\ncp {built} "$2"\n'
    )
    compiler.chmod(0o755)
    environment = {**os.environ, "SIM_DEVICES": "1", "XDG_CACHE_HOME": str(tmp_path), "CXX": str(compiler)}
    command = [sys.executable, "-c", "import torch; torch.ones(1, device='sim')"]
    processes = [subprocess.Popen(command, env=environment) for _ in range(3)]
    assert [process.wait(timeout=800) for process in processes] == [0, 0, 0]
    assert (tmp_path / "calls").read_text() == "called\n"
