"""LoRA with tp, TRL and Accelerate: python -m tests.bench.trainer.fine_tune

The programs of docs/examples/jobs/adapters, each in a process of its own, in turns: the time between the
first and the last forward pass of training, checkpoints included, and the process's peak memory.
"""

import json
import os
import runpy
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.bench._results import Results
from tests.bench.trainer.loops import is_installed

JOB = Path(__file__).parents[3] / "docs" / "examples" / "jobs" / "adapters"
LIBRARIES = {"tp": "tp_trainer", "accelerate": "accelerate", "trl": "trl"}
ROUNDS = 5


def watched(program: str) -> None:
    """Run a program in this process, and print what it took as a line of JSON."""
    import resource

    import job  # of the folder that the program lies in

    make, times = job.make, []

    def make_watched():
        model = make()
        model.register_forward_pre_hook(lambda *_: times.append(time.perf_counter()))
        return model

    job.make = make_watched
    runpy.run_path(program, run_name="__main__")
    steps = len(times) - len(job.loader())  # without the report's
    found = {
        "ms": 1e3 * (times[steps - 1] - times[0]) / (steps - 1),
        "MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }
    print("\n" + json.dumps(found))


def measure(library: str) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(JOB, folder, dirs_exist_ok=True)
        path = os.pathsep.join([folder, str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")])
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", "tests.bench.trainer.fine_tune", f"with_{library}.py"],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=600,
            check=True,
        )
    return json.loads(done.stdout.splitlines()[-1])


def run(results: Results) -> None:
    """A Llama of 4 layers, batches of 4 chats, two accumulated, LoRA on all linear layers, one thread."""
    found = {name: [] for name, module in LIBRARIES.items() if is_installed(module)}
    for _ in range(ROUNDS):
        for library, runs in found.items():
            runs.append(measure(library))
    for library, runs in found.items():
        ratio = statistics.median(r["ms"] / t["ms"] for r, t in zip(runs, found["tp"], strict=True))
        results.add(f"{library}: ms per batch", statistics.median(r["ms"] for r in runs), "ms")
        results.add(f"{library}: ratio", ratio, "x tp")
        results.add(f"{library}: peak memory", statistics.median(r["MiB"] for r in runs), "MiB")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        watched(sys.argv[1])
    else:
        with Results("trainer-fine-tune") as found:
            run(found)
