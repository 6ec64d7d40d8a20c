import subprocess
import sys

import tp_runner


def test_the_public_names_are_sorted_and_these():
    assert tp_runner.__all__ == [
        "CfgNode",
        "ItemTimeout",
        "NotPicklableError",
        "OrderedRunner",
        "ResultStream",
        "RunCancelled",
        "RunnerBusy",
        "RunnerClosed",
        "RunnerStats",
        "UnorderedRunner",
        "WorkerDied",
        "WorkerError",
        "WorkerStats",
        "map",
    ]
    assert sorted(tp_runner.__all__) == tp_runner.__all__
    assert all(hasattr(tp_runner, name) for name in tp_runner.__all__)


def test_neither_parent_nor_worker_imports_torch_when_nothing_uses_it():
    code = """
import sys, tp_runner
def loaded(_):
    import sys
    return "".join(["tor", "ch"]) in sys.modules  # a word that the fork server looks for
for method in ("spawn", "forkserver", "fork"):
    assert list(tp_runner.map(loaded, range(3), devices=2, start_method=method)) == [False] * 3
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=50)
