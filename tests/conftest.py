"""What all tests share."""

import functools
import gc
import importlib.util
import os
import re
import shutil
import signal
import sys
import tempfile
from importlib import metadata
from multiprocessing import util
from pathlib import Path
from types import ModuleType

import pytest

# Threads of OpenMP that have nothing to do sleep, here, where torch is yet to be loaded, and in programs
# that tests start. They would spin, which beside other load makes a small model's step ten times as dear.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("HYPOTHESIS_NO_PLUGINS", "1")  # one comes with trio, and imports it in every worker
try:
    from hypothesis import HealthCheck, settings
except ModuleNotFoundError:  # on a machine for the gpu tests, which need pytest alone
    settings = None

# How long an example takes says something about the machine alone. `default` draws the same few examples
# each time, to see that a test works; `thorough`, which `hatch run slow` asks for, many, and others each
# time. CI has the same ones each time, so more of them would find nothing new there.
if settings is not None:
    is_ci = "CI" in os.environ
    _anywhere = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None)
    settings.register_profile("default", _anywhere, max_examples=10, derandomize=True)
    settings.register_profile("thorough", _anywhere, max_examples=30 if is_ci else 100, derandomize=is_ci)
    settings.load_profile("default")


RING_3 = {"tp_accelerate", "tp_lightning", "tp_ray", "tp_simulator", "tp_testing"}
"""Folders of tests of packages that may break alone, with another library's release."""


def pytest_configure(config):
    _spare_the_disk()
    # Before 2.13 torch says so, once in a process, of each gradient that comes from another device; there
    # it says so of two streams of one device, which is an error.
    if tuple(map(int, metadata.version("torch").split(".")[:2])) < (2, 13):
        config.addinivalue_line("filterwarnings", "ignore:The AccumulateGrad node's stream:UserWarning")
    if not hasattr(config, "workerinput"):
        _gather_temporary_files()
    elif config.args_source is config.ArgsSource.TESTPATHS:
        _begin_with_other_files(config, **config.workerinput)
    # A shell starts what runs in the background with Ctrl-C ignored, and all that is started from there
    # would inherit that: tests send it.
    _hear_signals()
    # So would what nohup has ignored. A handler ends where a program is started, and this process lives on:
    # a worker of xdist is such a program.
    hang_up = getattr(signal, "SIGHUP", None)  # not on Windows
    if hang_up and (signal.getsignal(hang_up) is signal.SIG_IGN or hasattr(config, "workerinput")):
        signal.signal(hang_up, lambda *_: None)


_ENDING = {signal.SIGTERM: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}


def _hear_signals():
    """Have the signals that end a process end those that tests start; return which would not have."""
    mask = getattr(signal, "pthread_sigmask", lambda *_: ())  # not on Windows
    blocked = mask(getattr(signal, "SIG_UNBLOCK", None), _ENDING)
    unheard = {number for number in _ENDING if signal.getsignal(number) is signal.SIG_IGN}
    for number in unheard:
        signal.signal(number, _ENDING[number])
    return sorted(unheard.union(_ENDING.keys() & blocked))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown():
    result = yield
    if unheard := _hear_signals():
        names = [signal.Signals(number).name for number in unheard]
        pytest.fail(f"the test leaves signals ignored or blocked, and later programs with them: {names}")
    return result


def _spare_the_disk():
    """Leave what this process writes in the system's memory: tests would wait for the disk 12,000 times.

    It makes a difference after a power failure alone. Tests of what is flushed, and when, look at the calls;
    ranks and programs that tests start flush as ever.
    """
    os.fsync = os.fstat  # which raises for what is not open, too


_OF_FILE = re.compile(r"^pytestmark = \[?\s*pytest\.mark\.(\w+)", re.MULTILINE)


def _begin_with_other_files(config, *, workerid, workercount, **_):
    """Have each worker collect other files first: it writes the bytecode that the others then read.

    All would rewrite the assertions of all files in a fresh clone otherwise, side by side, 5 s each.
    """
    files = []
    for file in sorted((config.rootpath / "tests").rglob("test_*.py")):
        mark = _OF_FILE.search(file.read_text())
        if not mark or mark[1] not in _left_out(config):
            files.append(str(file))
    first = len(files) * int(workerid.removeprefix("gw")) // workercount
    config.args = files[first:] + files[:first]


def _gather_temporary_files():
    """Have the files of all processes, also of those that are killed, lie where they are removed."""
    usual = tempfile.gettempdir()
    folder = tempfile.mkdtemp(prefix="tp-tests-")
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", usual)  # pytest's own folders are to be looked at later
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    # After multiprocessing, which removes folders of its own in there at a priority of -100.
    util.Finalize(None, shutil.rmtree, (folder,), {"ignore_errors": True}, exitpriority=-200)


def _left_out(config):
    """Return the marks of tests that `-m` leaves out, as `hatch.toml` has it: thousands, in each worker."""
    return {
        "not slow": {"slow", "nightly"},
        "(slow or hypothesis) and not nightly": {"nightly"},
    }.get(config.option.markexpr, set())


def pytest_pycollect_makeitem(collector, name, obj):
    """Make no items of a function or class that is left out; what a parameter marks, `-m` leaves out."""
    if name.lower().startswith("test") and (left_out := _left_out(collector.config)):
        marks = getattr(obj, "pytestmark", ())
        marks = marks if isinstance(marks, list) else [marks]  # a class may have one, as written
        return [] if any(getattr(mark, "name", None) in left_out for mark in marks) else None
    return None


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config, items):
    for item in items:
        if "nightly" in item.keywords:
            item.add_marker("slow")
        if not RING_3.isdisjoint(item.path.parts):
            item.add_marker("ring3")
    if config.args_source is config.ArgsSource.TESTPATHS:
        items.sort(key=lambda item: item.path)  # alike in all workers, which collect in orders of their own
    _deselect_missing(config, items)
    yield  # -m is looked at
    if hasattr(config, "workerinput"):
        items[:] = _longest_first(items, config.workerinput["workercount"])


def _longest_first(items, workers):
    """Return tests so that each worker, which gets as many in a row, begins with the longest of all.

    A long one that begins last would keep one worker busy while the others have nothing to do.
    """
    seconds = {item: mark.args[0] for item in items if (mark := item.get_closest_marker("takes"))}
    longest = sorted(seconds, key=seconds.get, reverse=True)
    others, ordered = [item for item in items if item not in seconds], []
    for worker in range(workers):
        count = (len(items) - len(ordered)) // (workers - worker)  # as --dist worksteal hands them out
        ordered += longest[worker::workers]
        taken = max(0, count - len(longest[worker::workers]))
        ordered += others[:taken]
        del others[:taken]
    return ordered


def _deselect_missing(config, items):
    _deselect(config, items, [item for item in items if _missing(item)])
    import torch  # not by the process that only hands tests to others

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None and accelerator.type != "mps":  # of which there is one, and no process group
        return
    of_gpus = [item for item in items if "gpu" in item.keywords]
    if "gpu" in config.option.markexpr:  # who asks for them gets the reason of each
        for item in of_gpus:
            item.add_marker(pytest.mark.skip(reason="needs an accelerator"))
        return
    _deselect(config, items, of_gpus)


_find_spec = functools.cache(importlib.util.find_spec)


def _missing(item):
    needed = [module for mark in item.iter_markers("needs") for module in mark.args]
    return [module for module in needed if _find_spec(module) is None]


def _deselect(config, items, left_out):
    chosen = set(left_out)
    items[:] = [item for item in items if item not in chosen]
    config.hook.pytest_deselected(items=left_out)


def pytest_terminal_summary(terminalreporter):
    """Show what failed and was run again, which only CI asks for: a success the second time hides nothing.

    And that the site was not looked at, where there is no browser.
    """
    skipped = [r for r in terminalreporter.getreports("skipped") if "no browser: needs" in str(r.longrepr)]
    if skipped:
        title = f"THE SITE WAS NOT OPENED IN A BROWSER: {len(skipped)} tests of it were skipped"
        terminalreporter.section(title, red=True)
        terminalreporter.line(skipped[0].longrepr[2])
    rerun = terminalreporter.getreports("rerun")
    if not rerun:
        return
    terminalreporter.section(f"{len(rerun)} FAILED AND RUN AGAIN: mend what depends on chance", red=True)
    for report in rerun:
        terminalreporter.section(f"first failure of {report.nodeid}", sep="_", red=True)
        terminalreporter.line(report.longreprtext)
        for title, text in report.sections:
            terminalreporter.section(title, sep="-")
            terminalreporter.line(text)


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_looked_over = 0  # how many modules were loaded when the collector last looked at all there is


def _freeze():
    """Spare the collector, which many tests call, what is loaded by now and stays."""
    global _looked_over  # noqa: PLW0603 - of this process
    gc.freeze()
    _looked_over = len(sys.modules)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session):
    gc.disable()  # it would look again and again at thousands of tests that stay: a fifth of the time
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish(session):
    _freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item, nextitem):
    result = yield
    if len(sys.modules) > _looked_over + 100:  # as after the first optimizer step, or for transformers
        gc.collect()  # a test's garbage is to be freed
        _freeze()
    return result


@pytest.fixture(scope="session")
def zoo() -> ModuleType:
    """The models that all tests of replicas share."""
    return _load("replica_zoo")


@pytest.fixture(scope="session")
def memory() -> ModuleType:
    """What tests of memory share: tensors whose bytes are counted, and counts of reference cycles."""
    return _load("live_bytes")


@pytest.fixture(scope="session")
def two_ranks():
    """Two ranks for all checks that leave a process as it was: starting them costs more than a check."""
    from tp_testing import RankPool

    with RankPool(2) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def pair():
    """Two ranks of one file, whose checks may leave a process changed."""
    from tp_testing import RankPool

    with RankPool(2) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def four():
    """Four ranks of one file."""
    from tp_testing import RankPool

    with RankPool(4) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def one_thread_per_operation():
    """Replicas times threads must not exceed the cores."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["alone", "twice", "beside the CPU", "two"])
def gpu_devices(request):
    """The devices on which one process has parts of a batch: a card alone, and beside others."""
    from tests.accelerator import COUNT, GPU, SECOND

    if request.param == "two" and COUNT < 2:
        pytest.skip("needs two accelerators")
    devices = {"alone": [GPU], "twice": [GPU, GPU], "beside the CPU": [GPU, "cpu"], "two": [GPU, SECOND]}
    return devices[request.param]
