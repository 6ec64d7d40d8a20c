"""Tests of devices run in a process of their own: torch takes one device of this kind, and never lets it go.

A test with the mark `simulated` is called there by its name. They share that process, which has two devices.
"""

import importlib.util
import os
import traceback
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

_process = None


def pytest_pyfunc_call(pyfuncitem):
    if "simulated" not in pyfuncitem.keywords:
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    call = (str(pyfuncitem.path), pyfuncitem.originalname, arguments)
    failure = _simulator().submit(_run, *call).result(timeout=800)
    if failure:
        pytest.fail(failure, pytrace=False)
    return True


def pytest_sessionfinish(session):
    if _process is not None:
        _process.shutdown()


def _simulator():
    """Return the process with the devices; the first one of all compiles the extension."""
    global _process  # noqa: PLW0603 - one for all files, of this worker
    if _process is None:
        os.environ |= {"SIM_DEVICES": "2", "PYTHONFAULTHANDLER": "1"}
        try:
            _process = ProcessPoolExecutor(1, mp_context=get_context("spawn"))
            _process.submit(os.getpid).result(timeout=800)
        finally:
            del os.environ["SIM_DEVICES"], os.environ["PYTHONFAULTHANDLER"]
    return _process


def _run(path, name, arguments):
    """Run a test of a file in this process, and return the traceback of its failure, or None."""
    import tp_simulator

    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function = getattr(module, name)
    try:
        function(**arguments)
    except BaseException:  # noqa: BLE001 - as pytest, which reports them all
        return traceback.format_exc()
    finally:
        for device in (0, 1):
            tp_simulator.revive(device)  # whatever a test does to it, the next one has a device
    return None
