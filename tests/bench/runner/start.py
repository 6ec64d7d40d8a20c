"""From nothing to the first result of two workers, beside Pool: python -m tests.bench.runner.start

Each start method is measured in fresh interpreters, where both start by turns, without torch and with
torch imported: what a start costs depends on all that a process holds. Pool's fork server is told to
import torch once, as ours does by itself. The first start of an interpreter, with its imports and its
fork server, stands by itself, and each tool has its own interpreters for it: the second one there would find
modules that the first one has imported. Modules come from bytecode, as pip leaves them.
"""

import importlib
import json
import os
import sys
import time

WORKERS = 2
ROUNDS, PROCESSES = 20, 3

for _name in sys.argv[3:]:
    importlib.import_module(_name)


def square(x):
    return x * x


def ours(method):
    import tp_runner

    with tp_runner.map(square, [1], n_workers=WORKERS, start_method=method) as results:
        assert next(results) == 1


def pool(method):
    import multiprocessing

    multiprocessing.set_forkserver_preload(sys.argv[3:])
    with multiprocessing.get_context(method).Pool(WORKERS) as workers:
        assert next(workers.imap(square, [1])) == 1


def measure(method, first, *imported):
    """Print the milliseconds of both, start by start, as JSON; ``imported`` has been imported."""
    starts = sorted({"tp-runner": ours, "Pool": pool}.items(), key=lambda start: start[0] != first)
    times = {name: [] for name, _ in starts}
    for _ in range(ROUNDS if method != "spawn" or not imported else 3):
        for name, start in starts:
            began = time.perf_counter()
            start(method)
            times[name].append((time.perf_counter() - began) * 1e3)
    print(json.dumps(times))


def in_fresh_interpreters(method, imported, folder):
    """Return the first times and the later ones of each tool; bytecode is kept in ``folder``."""
    import subprocess

    environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environ["PYTHONPYCACHEPREFIX"] = folder
    firsts, laters = {}, {}
    for counted in [False] + [True] * PROCESSES:
        for first in ("tp-runner", "Pool"):
            command = [sys.executable, __file__, method, first, *imported]
            done = subprocess.run(
                command, env=environ, check=True, capture_output=True, text=True, timeout=600
            )
            if counted:
                found = json.loads(done.stdout)
                firsts.setdefault(first, []).append(found[first][0])
                for name, times in found.items():
                    laters.setdefault(name, []).extend(times[1:])
    return firsts, laters


def main():
    import statistics
    import tempfile

    from tests.bench._results import Results  # which programs that are run by their path do not find

    with tempfile.TemporaryDirectory() as folder, Results("runner-start") as results:
        for method in ("fork", "spawn", "forkserver"):
            for imported in ((), ("torch",)):
                firsts, laters = in_fresh_interpreters(method, imported, folder)
                for when, found in ((", the first", firsts), ("", laters)):
                    title = f"{method}{''.join(f', {name} imported' for name in imported)}{when}"
                    for name, times in found.items():
                        results.add(f"{title}, {name}", statistics.median(times), "ms")
                    pairs = zip(found["Pool"], found["tp-runner"], strict=True)
                    ratio = statistics.median(other / own for other, own in pairs)
                    results.add(f"{title}, Pool: ratio", ratio, "x as fast")


if __name__ == "__main__":
    measure(*sys.argv[1:]) if sys.argv[1:] else main()
