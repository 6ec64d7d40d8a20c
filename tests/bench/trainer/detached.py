"""A script in the background, from the command to its first line: python -m tests.bench.trainer.detached

``tp launch --detach`` has a supervisor beside the script, which keeps its output and how it ended;
``torchrun`` in the background has one that keeps nothing, and Python alone has none.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from tests.bench._results import Results

ROUNDS = 7
SCRIPT = """
import os, sys, time
began = time.time()
with open(sys.argv[1] + ".new", "w") as file:
    file.write(str(began))
os.rename(sys.argv[1] + ".new", sys.argv[1])
"""


def measure(command: list[str], mark: Path, environ: dict[str, str]) -> tuple[float, float]:
    """Return the seconds until the command is back, and until the script's first line."""
    began = time.time()
    process = subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL, start_new_session=True)
    if "--detach" in command:
        process.wait(300)
    back = time.time() - began
    while not mark.exists():
        if time.time() - began > 300:
            msg = f"{command} has not begun after 300 s"
            raise TimeoutError(msg)
        time.sleep(0.001)
    first = float(mark.read_text()) - began
    mark.unlink()
    process.wait(300)
    while any(
        str(mark.parent) in " ".join(p.info["cmdline"] or ()) for p in psutil.process_iter(["cmdline"])
    ):
        time.sleep(0.01)  # its supervisor has still to write how it ended
    return back, first


def main() -> None:
    scripts = Path(sys.executable).parent
    with tempfile.TemporaryDirectory() as folder, Results("trainer-detached") as results:
        script, mark = Path(folder, "script.py"), Path(folder, "mark")
        script.write_text(SCRIPT)
        end = [str(script), str(mark)]
        commands = {
            "Popen of Python": [sys.executable, *end],
            "torchrun": [str(scripts / "torchrun"), "--nproc-per-node", "1", "--standalone", *end],
            "tp launch --detach": [str(scripts / "tp"), "launch", "--detach", "-n", "1", *end],
        }
        environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        environ |= {"TP_STATE_DIR": f"{folder}/jobs", "PYTHONPYCACHEPREFIX": f"{folder}/bytecode"}
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
        for counted in [False] + [True] * ROUNDS:  # the first writes bytecode, as pip does
            for name, command in commands.items():
                times = measure(command, mark, environ)
                if counted:
                    found[name].append(times)
        for place, title in enumerate(("the command is back", "the script's first line")):
            for name, rounds in found.items():
                results.add(f"{title}, {name}", statistics.median(each[place] for each in rounds), "s")
        plain = statistics.median(first for _, first in found["Popen of Python"])
        for name, rounds in found.items():
            ratio = statistics.median(first for _, first in rounds) / plain
            results.add(f"the script's first line, {name}: ratio", ratio, "x the time")


if __name__ == "__main__":
    main()
