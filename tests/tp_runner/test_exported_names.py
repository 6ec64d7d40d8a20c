import builtins
import inspect
import subprocess
import sys

import tp_runner
from tp_core.errors import TpError
from tp_runner import _options, errors


def test_the_public_names_are_sorted_and_these():
    assert tp_runner.__all__ == [
        "CfgNode",
        "Executor",
        "ItemInfo",
        "ItemRng",
        "ItemTimeoutError",
        "NotPicklableError",
        "OrderedRunner",
        "Pipeline",
        "ResultStream",
        "RunCancelledError",
        "RunnerClosedError",
        "RunnerOptions",
        "RunnerStats",
        "StageStats",
        "UnorderedRunner",
        "WorkerDiedError",
        "WorkerError",
        "WorkerInfo",
        "WorkerStats",
        "compat",
        "errors",
        "item",
        "register_joblib",
        "worker",
    ]
    assert all(hasattr(tp_runner, name) for name in tp_runner.__all__)


def test_a_star_import_shadows_no_builtin():
    names = {}
    exec("from tp_runner import *", names)
    assert not set(names) & set(dir(builtins))
    assert callable(tp_runner.map)


def test_every_error_says_so_by_its_name_and_is_a_builtin_too():
    for name in errors.__all__:
        kind = getattr(errors, name)
        assert name.endswith("Error")
        assert issubclass(kind, TpError)
        assert name == "ItemError" or name in (errors.__doc__ or "")


def test_neither_parent_nor_worker_imports_torch_when_nothing_uses_it():
    code = """
import sys
before = set(sys.modules)
import tp_runner
def loaded(_):
    import sys
    return "".join(["tor", "ch"]) in sys.modules  # a word that the fork server looks for
for method in ("spawn", "forkserver", "fork"):
    assert list(tp_runner.map(loaded, range(3), devices=2, start_method=method)) == [False] * 3
assert not {"torch", "pathlib"} & set(sys.modules) - before
# What programs of `__main__` need is imported once for all workers.
assert list(tp_runner.map(eval, ["'cloudpickle' in __import__('sys').modules"], devices=1)) == [True]
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=800)


def test_a_first_start_imports_little_until_the_first_result():
    code = """
import sys
import tp_runner
before = set(sys.modules)
def loaded(_):
    return set(__import__("sys").modules)
with tp_runner.map(loaded, [0], n_workers=2, start_method="fork") as results:
    new = next(results) - before
slow = {"ctypes", "dataclasses", "dis", "importlib.util", "inspect", "random", "socket"}
assert not slow & new, slow & new
"""
    # Without the site, whose editable installs import some of them.
    found = f"import sys; sys.path[:] = {sys.path!r}\n{code}"
    subprocess.run([sys.executable, "-S", "-c", found], check=True, timeout=800)


def test_async_work_is_known_by_the_flags_of_inspect():
    assert _options.ASYNC_FLAGS == inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
