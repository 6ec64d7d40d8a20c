"""Every gpu test and every GPU benchmark of all packages, on this machine, into one JSON file.

    python tests/gpu/run.py --json out/gpu.json

A machine may be lent for fifteen minutes. What is worth most comes first, each with a limit: that every
backend computes on the card what it computes on the CPU, then the other tests, then the benchmarks, the
language model before all others. What does not fit is "not run", which is no failure. ``--device sim``
rehearses it on simulated devices.

It needs Python, torch, what the packages require, and pytest for the tests; the packages are taken from the
sources beside it unless they are installed. Each package's tests and each benchmark is a process with a
deadline: what fails, hangs or crashes is written down, and the rest goes on. The file is written as each test
ends, so a run that is killed leaves what it knew, and no process. The exit status is 0 unless something
failed: what is skipped, is skipped with its reason.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
GOOD = {"passed", "skipped", "not run"}
TRIES = 6
"""How often the tests of one package are begun again after one of them took the process along."""


class Report:
    """What is known so far, in a file that is always whole.

    Args:
        path: Where to write it; ``None`` for nowhere.
    """

    def __init__(self, path=None):
        self._path = path
        self._lock = threading.Lock()
        self._began = time.monotonic()
        self.content = {
            "format": 1,
            "began": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "seconds": 0.0,
            "machine": {},
            "summary": {},
            "tests": [],
            "benchmarks": [],
        }

    def add(self, section, entries):
        """Add tests or benchmarks, and write the file."""
        with self._lock:
            self.content[section] += entries
            for entry in entries:
                print(f"{entry['outcome']:<14}{entry['seconds']:>7.1f} s  {entry['name']}", flush=True)
                if entry["outcome"] not in GOOD:
                    print(f"    {str(entry.get('reason', ''))[-1500:]}", flush=True)
            self._save()

    def describe(self, machine):
        """Set what is known of the machine, and write the file."""
        with self._lock:
            self.content["machine"] = machine
            self._save()

    def _save(self):
        self.content["seconds"] = round(time.monotonic() - self._began, 1)
        for section in ("tests", "benchmarks"):
            counts = {}
            for entry in self.content[section]:
                counts[entry["outcome"]] = counts.get(entry["outcome"], 0) + 1
            self.content["summary"][section] = counts
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            fresh = self._path.with_suffix(".part")
            fresh.write_text(json.dumps(self.content, indent=1) + "\n")
            fresh.replace(self._path)

    @property
    def is_good(self):
        """Whether nothing failed."""
        return all(e["outcome"] in GOOD for s in ("tests", "benchmarks") for e in self.content[s])


# -- what the processes need ------------------------------------------------------------------------------


def make_environment(folder):
    """Return the environment of the processes, in which all packages can be imported and found.

    Packages that are not installed come from their sources, and get the metadata that makes their plugins
    known in ``folder``.
    """
    paths = []
    for project in sorted(ROOT.glob("packages/*/pyproject.toml")):
        described = tomllib.loads(project.read_text())["project"]
        try:
            metadata.version(described["name"])
        except metadata.PackageNotFoundError:
            paths.append(str(project.parent / "src"))
            _describe_package(described, folder)
    if paths:
        paths.append(str(folder))
    before = os.environ.get("PYTHONPATH")
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*paths, *([before] if before else [])]),
        "PYTHONUNBUFFERED": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def _describe_package(described, folder):
    info = folder / f"{described['name'].replace('-', '_')}-{described['version']}.dist-info"
    info.mkdir()
    head = f"Metadata-Version: 2.1\nName: {described['name']}\nVersion: {described['version']}\n"
    (info / "METADATA").write_text(head)
    lines = []
    for group, entries in described.get("entry-points", {}).items():
        lines += [f"[{group}]", *(f"{name} = {target}" for name, target in entries.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")


def write_ini(folder):
    """Write a configuration of pytest that needs no plugin; warnings are told and fail nothing."""
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    markers = [*options["markers"], "timeout: a deadline, where pytest-timeout is installed"]
    path = folder / "pytest.ini"
    path.write_text("[pytest]\nmarkers =\n" + "".join(f"    {marker}\n" for marker in markers))
    return path


MACHINE = """
import json, platform, sys
found = {"python": platform.python_version(), "platform": platform.platform()}
try:
    import torch
    found["torch"], found["cuda"] = torch.__version__, torch.version.cuda
    found["devices"] = []
    for i in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(i)
        found["devices"].append({"name": p.name, "bytes": p.total_memory, "capability": [p.major, p.minor]})
    if torch.cuda.is_available():
        found["cudnn"] = torch.backends.cudnn.version()
        found["nccl"] = list(torch.cuda.nccl.version())
except Exception as error:
    found["error"] = repr(error)
from importlib import metadata
for name in ("pytest", "numpy"):
    try:
        found[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        found[name] = None
ours = [one for one in metadata.distributions() if one.name.startswith("tp-")]
found |= {one.name: one.version for one in sorted(ours, key=lambda one: one.name)}
print(json.dumps(found))
"""


def describe_machine(environment, deadline):
    """Return Python's, torch's and the packages' versions, and the devices."""
    output, status = run([sys.executable, "-c", MACHINE], environment, deadline=min(deadline, now() + 90))
    try:
        found = json.loads(output.strip().splitlines()[-1])
    except (IndexError, ValueError):
        found = {"error": f"no description came, status {status}: {output[-1500:]}"}
    return {"cores": os.cpu_count(), **found}


# -- processes with deadlines ------------------------------------------------------------------------------


def now():
    return time.monotonic()


WATCHER = """
import os, signal, sys
if not sys.stdin.buffer.read(1):
    os.killpg(int(sys.argv[1]), signal.SIGKILL)
"""
"""Ends a process and what it started when this one is killed: they would go on using the device."""


def run(command, environment, *, deadline, is_over=lambda: False, folder=ROOT):
    """Run a process; return what it printed and its status, ``None`` if it was ended.

    Args:
        command: What to run.
        environment: Its environment.
        deadline: When to end it, and all it has started, at the latest.
        is_over: Asked now and then whether to end it before.
        folder: Where it runs.
    """
    with tempfile.TemporaryFile() as printed:
        process = subprocess.Popen(
            command,
            env=environment,
            stdout=printed,
            stderr=subprocess.STDOUT,
            cwd=folder,
            start_new_session=True,
        )
        watcher = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", WATCHER, str(process.pid)],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            while process.poll() is None and now() < deadline and not is_over():
                time.sleep(0.1)
            status = process.poll()
        finally:
            # What it has started may outlive it.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            watcher.communicate(b"-")
            process.wait()
        printed.seek(0)
        return printed.read().decode(errors="replace"), status


# -- tests -------------------------------------------------------------------------------------------------


WORTH = ("integration", "tp_trainer", "tp_core", "tp_context", "tp_pipeline", "tp_shard")
"""The packages whose tests begin first: backends beside the CPU, and what has streams of its own."""


def groups_of_tests(folder):
    """Return the files that have gpu tests, by package, in order of worth."""
    groups = {}
    for path in sorted(folder.rglob("test_*.py")):
        if "mark.gpu" in path.read_text(errors="replace"):
            groups.setdefault(path.relative_to(folder).parts[0], []).append(path)
    names = [name for name in WORTH if name in groups]
    return {name: groups[name] for name in [*names, *(name for name in groups if name not in names)]}


def read_record(path):
    """Return the events of a record; the last line may be half written."""
    events = []
    for line in path.read_text(errors="replace").splitlines() if path.exists() else []:
        try:
            events.append(json.loads(line))
        except ValueError:
            break
    return events


def run_tests(
    package, files, *, ini, environment, deadline, limit_s, root=ROOT, options=(), add=lambda entries: None
):
    """Run a package's gpu tests, and go on after each that ends the process or takes too long.

    Args:
        package: The name of the group.
        files: The test files.
        ini: pytest's configuration.
        environment: That of the processes.
        deadline: When all has to be over.
        limit_s: How long one test may take.
        root: What the names of tests are relative to.
        options: Further options of pytest.
        add: Called with entries as they are known.
    """
    known = {}  # name -> entry
    left = [str(path) for path in files]

    def add_new(entries):
        new = {name: entry for name, entry in entries.items() if name not in known}
        known.update(new)
        if new:
            add(list(new.values()))

    for attempt in range(TRIES):
        folder = Path(tempfile.mkdtemp(dir=ini.parent))
        record = folder / "record"

        def is_stuck(record=record):
            events = read_record(record)
            starts = [i for i, event in enumerate(events) if event["event"] == "start"]
            # Before the last start: what a test warned of is written after its end.
            add_new(_entries(events[: starts[-1]] if starts else [], package)[1])
            running = _running(events)
            return running is not None and time.time() - running["at"] > limit_s

        command = [
            sys.executable,
            str(HERE / "session.py"),
            str(record),
            str(ini),
            str(root),
            *options,
            *left,
        ]
        output, status = run(command, environment, deadline=deadline, is_over=is_stuck, folder=root)
        events = read_record(record)
        ids, entries = _entries(events, package)
        running = _running(events)
        if running is not None:
            outcome, reason = "crashed", output[-3000:]
            if status is None:
                outcome, reason = "timeout", f"not over after {limit_s:.0f} s"
                if now() >= deadline:
                    outcome, reason = "not run", "out of time"
            entries[running["id"]] = _entry(running["id"], package, outcome, reason=reason)
        add_new(entries)
        left = [name for name in ids if name not in known]
        is_out_of_time = now() >= deadline
        if not ids and not entries:
            outcome, reason = "not collected", f"status {status}: {output[-3000:]}"
            if is_out_of_time:
                outcome, reason = "not run", "out of time"
            add([_entry(str(package), package, outcome, reason=reason)])
            return
        if not left:
            return
        if is_out_of_time or running is None or attempt == TRIES - 1:
            reason = "out of time" if is_out_of_time else f"the process ended before, status {status}"
            add([_entry(name, package, "not run", reason=reason) for name in left])
            return


def _running(events):
    """Return the start of the test that has not ended."""
    running = None
    for event in events:
        if event["event"] == "start":
            running = event
        elif event["event"] == "end":
            running = None
    return running


def _entries(events, package):
    """Return the names of all tests, and the entry of each that has ended."""
    ids, entries, warned = [], {}, {}
    for event in events:
        kind, name = event["event"], event.get("id")
        if kind == "collected":
            ids = event["ids"]
        elif kind == "not collected":
            entries[name] = _entry(name, package, kind, reason=event["message"])
        elif kind == "warning":
            warned.setdefault(name, []).append(event["message"])
        elif kind == "report":
            entry = entries.setdefault(name, _entry(name, package, "passed"))
            entry["seconds"] = round(entry["seconds"] + event["seconds"], 3)
            if event["outcome"] != "passed" and entry["outcome"] in GOOD:
                entry["outcome"] = event["outcome"]
                entry["reason"] = event["message"]
    running = _running(events)
    if running is not None:
        entries.pop(running["id"], None)
    for name, messages in warned.items():
        if name in entries:
            entries[name]["warnings"] = messages
    return ids, entries


def _entry(name, package, outcome, *, seconds=0.0, **more):
    return {"name": name, "package": package, "outcome": outcome, "seconds": seconds, **more}


LEAST_S = 10.0  # in less, no benchmark would come to its first figure

# -- benchmarks --------------------------------------------------------------------------------------------


def benchmark_limits(environment):
    """Return the benchmarks that there are, and how many seconds each may take."""
    output, _ = run([sys.executable, str(HERE / "benchmarks.py"), "--list"], environment, deadline=now() + 60)
    return {name: float(limit_s) for name, limit_s in map(str.split, output.splitlines())}


def run_benchmark(name, *, folder, environment, limit_s, end, device="cuda:0"):
    """Run one benchmark in a process of its own, until its limit or the end of all; return its entry."""
    began = now()
    if end - began < LEAST_S:
        return _entry(name, "benchmarks", "not run", reason="out of time")
    path = folder / f"{name}.json"
    command = [sys.executable, str(HERE / "benchmarks.py"), name, str(path), "--device", device]
    output, status = run(command, environment, deadline=min(end, began + limit_s))
    seconds = round(now() - began, 1)
    if not path.exists():
        outcome = "timeout" if status is None else "crashed"
        if status is None and now() >= end:
            outcome = "not run"
        reason = output[-3000:] or "out of time"
        return _entry(name, "benchmarks", outcome, seconds=seconds, reason=reason)
    found = json.loads(path.read_text())
    return _entry(name, "benchmarks", found.pop("outcome"), seconds=seconds, **found)


# -- the command -------------------------------------------------------------------------------------------


def main(arguments=None):
    """Run what was asked for; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, help="where to write what was found")
    parser.add_argument("--list", action="store_true", help="print the names of the tests and benchmarks")
    parser.add_argument("--only", choices=["tests", "benchmarks"], help="leave out the others")
    parser.add_argument("--device", choices=["cuda", "sim"], default="cuda", help="sim, to rehearse it")
    parser.add_argument("--budget-s", type=float, default=900.0, help="seconds for all of it (900)")
    parser.add_argument("--limit-s", type=float, default=120.0, help="seconds for one test (120)")
    parser.add_argument("--jobs", type=int, help="packages that are tested at once")
    given = parser.parse_args(arguments)
    end = now() + given.budget_s
    with tempfile.TemporaryDirectory(prefix="tp-gpu-") as name:
        folder = Path(name)
        environment, ini = make_environment(folder), write_ini(folder)
        if given.list:
            return _list(ini, environment, end)
        report = Report(given.json)
        report.describe(describe_machine(environment, end))
        print(json.dumps(report.content["machine"]), flush=True)
        if given.only != "benchmarks":
            # Benchmarks get what the tests leave, and two fifths of the time at least.
            deadline = end if given.only else end - 0.4 * given.budget_s
            jobs = given.jobs or max(1, min(7, (os.cpu_count() or 1) // 2))
            options = {"ini": ini, "environment": environment, "deadline": deadline, "limit_s": given.limit_s}
            if given.device == "sim":
                options["options"] = ["--device=sim"]
            with ThreadPoolExecutor(jobs) as pool:
                runs = [
                    pool.submit(
                        run_tests, package, files, **options, add=lambda entries: report.add("tests", entries)
                    )
                    for package, files in groups_of_tests(ROOT / "tests").items()
                ]
            for one in runs:
                one.result()
        if given.only != "tests":
            if given.device == "sim":
                environment["SIM_DEVICES"] = "2"
            options = {"folder": folder, "environment": environment, "device": f"{given.device}:0"}
            for benchmark, limit_s in benchmark_limits(environment).items():
                report.add("benchmarks", [run_benchmark(benchmark, limit_s=limit_s, end=end, **options)])
    print(json.dumps(report.content["summary"]), flush=True)
    return 0 if report.is_good else 1


def _list(ini, environment, end):
    failed = False
    for files in groups_of_tests(ROOT / "tests").values():
        record = Path(tempfile.mkdtemp(dir=ini.parent)) / "record"
        command = [
            sys.executable,
            str(HERE / "session.py"),
            str(record),
            str(ini),
            str(ROOT),
            "--collect-only",
        ]
        output, _ = run([*command, *map(str, files)], environment, deadline=end)
        events = read_record(record)
        if all(event["event"] != "collected" for event in events):
            failed = True
            print(output[-3000:], file=sys.stderr)
        for event in events:
            if event["event"] == "not collected":
                failed = True
                print(event["message"], file=sys.stderr)
            for name in event.get("ids", ()):
                print(name)
    for name in benchmark_limits(environment):
        print(f"benchmark {name}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
