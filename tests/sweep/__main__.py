"""Run one program on every engine, started by each method, in each form: ``python -m tests.sweep``.

Each form is a process of its own, with a /dev/shm of its own where the system allows it. After it nothing
may be left: no process, no file of shared memory; and, within it, no thread and no descriptor of any kind.
``--forms`` and ``--engines`` leave out the others.
"""

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

from tests.own_words import own_words

PROGRAM = Path(__file__).with_name("program.py")
ENGINES = ["forkserver", "spawn", "fork", "thread", "inline", "ray"]
# As the folder below has it.
FORMS = {
    "script": ["program.py"],
    "text": ["-c", PROGRAM.read_text()],
    "module": ["-m", "package.program"],
    "notebook": ["notebook.py"],
    "pytest": ["-m", "pytest", "-q", "-p", "no:cacheprovider", "test_program.py"],
    "import": ["-c", "import imported; imported.main()"],
}
NOTEBOOK = """
import pathlib, sys
sys.path.insert(0, {root!r})
from tests.notebooks import outputs_of
cells = {{"program": pathlib.Path("program.py").read_text()}}
for output in outputs_of(cells, pathlib.Path.cwd())["program"]:
    if output.output_type == "error" or output.get("name") == "stderr":  # and not the progress of each map
        print(output.get("text", output), file=sys.stderr)
"""
_MARK = "SWEEP_MARK"
_ENDING_S = 10.0  # a killed worker takes a moment
_LATE = "still waiting for the cluster to start 1 actors\n"  # of ours, where the machine has far more to do


def write_forms(folder: Path) -> None:
    """Write the program under the names that the forms have for it."""
    text = PROGRAM.read_text()
    (folder / "package").mkdir()
    (folder / "package" / "__init__.py").touch()
    (folder / "package" / "helper.py").write_text("from tp_runner import OrderedRunner\n")
    of_package = text.replace(
        "import tp_runner\n", "import tp_runner\n\nfrom . import helper  # noqa: F401\n", 1
    )
    (folder / "package" / "program.py").write_text(of_package)
    for name in ("program.py", "test_program.py", "imported.py"):
        (folder / name).write_text(text)
    root = str(PROGRAM.parents[2])
    (folder / "notebook.py").write_text(NOTEBOOK.format(root=root))


def private_shared_memory() -> list[str]:
    """Return what starts a shell with a /dev/shm of its own, where nobody else has files; or nothing."""
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    if shutil.which("unshare") is None:
        return []
    can = subprocess.run([*command, "mount -t tmpfs tmpfs /dev/shm"], capture_output=True, check=False)
    return command if can.returncode == 0 else []


def processes_with(mark: str) -> list[str]:
    """Return the command lines of the processes that a program has left."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if f"{_MARK}={mark}".encode() in (path / "environ").read_bytes():
                found.append((path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:  # it has ended, or is another user's
            continue
    return found


def run(form: str, engines: list[str]) -> tuple[int, list[str]]:
    """Return how many checks a form has had, and a line for each that failed."""
    mark = uuid.uuid4().hex
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_forms(folder)
        out = folder / "out"
        out.touch()
        environ = {k: v for k, v in os.environ.items() if k != "PYTHONSAFEPATH"}
        environ |= {"SWEEP_OUT": str(out), "SWEEP_ENGINES": " ".join(engines), _MARK: mark}
        command = [sys.executable, *FORMS[form]]
        if private := private_shared_memory():
            shell = 'mount -t tmpfs tmpfs /dev/shm && "$@"; code=$?; ls -A /dev/shm >shm; exit $code'
            command = [*private, shell, "sh", *command]
        done = subprocess.run(
            command, cwd=folder, env=environ, capture_output=True, text=True, timeout=1500, check=False
        )
        deadline = time.monotonic() + _ENDING_S
        while (left := processes_with(mark)) and time.monotonic() < deadline:
            time.sleep(0.1)
        checks = [json.loads(line) for line in out.read_text().splitlines()]
        shm = (folder / "shm").read_text().split() if private else []
    failed = [f"{engine}, {kind}: {found}" for engine, kind, is_right, found in checks if not is_right]
    if left:
        failed.append(f"processes are left: {left}")
    if shm:
        failed.append(f"files of shared memory are left: {shm}")
    # A notebook ends its kernel, and with it its threads, before Python's own end.
    if done.returncode or not checks or (form != "notebook" and checks[-1][0] != "at exit"):
        failed.append(f"it ended with {done.returncode} after {len(checks)} checks: {done.stderr[-2000:]}")
    elif words := own_words(done.stderr).replace(_LATE, "").strip():
        failed.append(f"it has said: {words[-2000:]}")
    return len(checks), failed


def available(engines: list[str]) -> list[str]:
    """Return the engines without those that are not installed here."""
    return [engine for engine in engines if engine != "ray" or importlib.util.find_spec("ray") is not None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--forms", nargs="+", default=[*FORMS], choices=FORMS)
    parser.add_argument("--engines", nargs="+", default=ENGINES, choices=ENGINES)
    arguments = parser.parse_args()
    n_failed = 0
    for form in arguments.forms:
        n_checks, failed = run(form, available(arguments.engines))
        n_failed += len(failed)
        print(f"{form}: {n_checks} checks, {len(failed)} failed", *failed, sep="\n  ", flush=True)
    sys.exit(n_failed > 0)


if __name__ == "__main__":
    main()
