"""A program with one of each kind of work that workers are given, and of what surrounds it.

`tests.sweep` runs it as a script, as text, as a module, in a notebook, under pytest, and imported. It uses
one engine after the other, and writes what each kind has come to into a file: its streams are what it tests.
"""

import atexit
import collections
import contextlib
import contextvars
import ctypes
import decimal
import functools
import gc
import io
import json
import logging
import os
import signal
import stat
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
import tp_runner
from tp_core.errors import TpError

ENGINES = {
    "forkserver": {},
    "spawn": {"start_method": "spawn"},
    "fork": {"start_method": "fork"},
    "thread": {"engine": "thread"},
    "inline": {"engine": "inline"},
    "ray": {"engine": "ray"},
}

# -- What a script defines ------------------------------------------------------------------------


@functools.lru_cache
def load():
    return {"offset": 100}


@functools.singledispatch
def kind_of(x):
    return "any"


@kind_of.register
def _(x: int):
    return "int"


class Document:
    lock = threading.Lock()

    def __init__(self, n):
        self.n = n

    @functools.cached_property
    def size(self):
        with self.lock:
            return self.n * 2

    @functools.lru_cache  # noqa: B019 - as people write it
    def plus(self, n):
        return self.n + n


LOCK, EVENT, LOCAL = threading.RLock(), threading.Event(), threading.local()
EVENT.set()
VARIABLE = contextvars.ContextVar("variable", default=1)
LIBRARY = ctypes.CDLL(None)
LIBRARY.strtod.restype = ctypes.c_double
LOG = logging.getLogger("program")
FILE = Path(__file__ if "__file__" in globals() else os.devnull).open()  # noqa: SIM115 - as people write it


def use_all(x):
    with LOCK:
        LOCAL.x = x
        LOG.debug("at work")
        found = (load()["offset"] + x, kind_of(x), Document(x).size, Document(x).plus(x), EVENT.is_set())
        return *found, VARIABLE.get(), LIBRARY.strtod(b"1.5", None), LOCAL.x


def use_file(_):
    return FILE.closed


def definitions(options):
    return next(tp_runner.map(use_all, [3], n_workers=1, **options))


def items_of_a_class(options):
    documents = list(tp_runner.map(use_document, map(Document, range(3)), n_workers=1, **options))
    return all(type(document) is Document for document in documents), [each.n for each in documents]


def use_document(document):
    return Document(document.size)


def an_open_file(options):
    try:
        return next(tp_runner.map(use_file, [0], n_workers=1, **options))
    except tp_runner.NotPicklableError as error:
        return "FILE" in str(error) and "an open file" in str(error)


# -- Streams, strides, surroundings ---------------------------------------------------------------


class HasWriteAlone:
    def write(self, text):
        return len(text)


def foreign_streams(options):
    closed = io.StringIO()
    closed.close()
    before = sys.stdout, sys.stderr
    found = []
    try:
        for stream in (None, closed, HasWriteAlone()):
            sys.stdout = sys.stderr = stream
            found += tp_runner.map(abs, [-1], n_workers=1, **options)
    finally:
        sys.stdout, sys.stderr = before
    return found


def strides_of(x):
    return x.stride(), x


def strides(options):
    image = torch.rand(2, 3, 8, 8).to(memory_format=torch.channels_last)
    there, back = next(tp_runner.map(strides_of, [image], n_workers=1, **options))
    return there == image.stride() == back.stride() and torch.equal(back, image)


def a_module(options):
    module = torch.nn.Linear(2, 1).requires_grad_(False)
    return torch.equal(
        next(tp_runner.map(module, [torch.ones(2)], n_workers=1, **options)), module(torch.ones(2))
    )


def state(path):
    path.write_text("")
    mode = stat.S_IMODE(path.stat().st_mode)
    path.unlink()
    return time.strftime("%Z", time.localtime(0)), mode, str(decimal.Decimal(1) / 3)


def surroundings(options):
    before, mask = os.environ.get("TZ"), os.umask(0o077)
    os.environ["TZ"] = "Asia/Tokyo"
    time.tzset()
    path = Path(tempfile.mkdtemp()) / "file"
    try:
        with decimal.localcontext(prec=4):
            return next(tp_runner.map(state, [path], n_workers=1, **options))
    finally:
        os.umask(mask)
        os.environ.pop("TZ") if before is None else os.environ.update(TZ=before)
        time.tzset()
        path.parent.rmdir()


def one_hash(options):
    return len(set(tp_runner.map(hash, ["text"] * 4, n_workers=2, queue_scale=1, **options)))


def multiply(n):
    return (torch.ones(n, n) @ torch.ones(n, n)).sum().item()


def after_openmp(options):
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        expected = multiply(400)
        return list(tp_runner.map(multiply, [400] * 2, n_workers=1, **options)) == [expected] * 2
    finally:
        torch.set_num_threads(threads)


# -- Errors and deaths ----------------------------------------------------------------------------


def raise_group(_):
    raise ExceptionGroup("two", [ValueError("a"), KeyError("b")])


def groups(options):
    found = []
    try:
        list(tp_runner.map(raise_group, [0], n_workers=1, **options))
    except* KeyError as group:
        found.append(len(group.exceptions))
    except* ValueError:
        found.append("value")
    return found


def raise_stop(x):
    if x == 1:
        raise StopIteration(x)
    return x


def a_stop_iteration(options):
    """A pool that takes it for the end of the results would leave out the rest."""
    found = tp_runner.map(raise_stop, range(4), n_workers=1, on_error="return", **options)
    return [getattr(each, "type_name", each) for each in found]


def kill_once(path):
    if not path.exists():
        path.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return "alive"


def ignored_children(options):
    """The program ignores SIGCHLD, and a worker is killed."""
    path = Path(tempfile.mkdtemp()) / "died"
    if options.get("engine", "process") in {"thread", "inline"}:
        path.touch()
    else:
        options = {**options, "max_restarts": 1}
    before = signal.getsignal(signal.SIGCHLD)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        return next(tp_runner.map(kill_once, [path], n_workers=1, **options))
    finally:
        signal.signal(signal.SIGCHLD, before)
        path.unlink()
        path.parent.rmdir()


class Increments(tp_runner.OrderedRunner):
    @staticmethod
    def producer_work(device, cfg, item):
        return item + 1


def its_own_input(options):
    with Increments(n_workers=1, **options) as runner:
        return list(runner.stream(result for result in runner.stream(range(3))))


def nested(n):
    return sum(tp_runner.map(abs, range(n), n_workers=1, engine="thread"))


def nested_runners(options):
    return list(tp_runner.map(nested, [3, 4], n_workers=1, **options))


STARTS_RUNNERS = """
import tp_runner

def work(x):
    return x

FOUND = list(tp_runner.map(work, range(2), n_workers=2, **{options}))
"""


def at_import(options):
    """A module that maps when it is imported is refused where workers would import it, too."""
    folder = tempfile.TemporaryDirectory()
    with folder:
        Path(folder.name, "starts_runners.py").write_text(STARTS_RUNNERS.format(options=options))
        sys.path.insert(0, folder.name)
        try:
            import starts_runners
        except TpError as error:
            return "put it under if __name__ == '__main__'" in str(error)
        else:
            return starts_runners.FOUND == [0, 1]
        finally:
            sys.path.remove(folder.name)
            sys.modules.pop("starts_runners", None)


KINDS = {
    definitions: (103, "int", 6, 6, True, 1, 1.5, 3),
    items_of_a_class: (True, [0, 2, 4]),
    # Refused by name where it is a script's; a module is imported by workers, which open files of their own.
    an_open_file: {**dict.fromkeys(["forkserver", "spawn", "ray"], __name__ == "__main__"), "": False},
    foreign_streams: [1, 1, 1],
    strides: True,
    a_module: True,
    surroundings: ("JST", 0o600, "0.3333"),
    one_hash: 1,
    after_openmp: True,
    groups: [1, "value"],
    a_stop_iteration: [0, "StopIteration", 2, 3],
    ignored_children: "alive",
    its_own_input: [1 + 1, 2 + 1, 3 + 1],
    nested_runners: [3, 6],
    at_import: True,
}


# -- What is left ---------------------------------------------------------------------------------


def held(engine):
    """Return the threads of this process, and what its descriptors are of."""
    files = collections.Counter()
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # it was the listing's own
            files[str(path.readlink()).partition(":[")[0]] += 1
    if engine == "ray":  # its connections come and go when its cluster does, and not with our actors
        files -= collections.Counter({"anon_inode": files["anon_inode"], "socket": files["socket"]})
    return collections.Counter(thread.name for thread in threading.enumerate()), files


def left_behind(before, engine):
    """Return the threads and the files that there are more of than before, if they stay for 10 s."""
    n_threads, n_files = (each.total() for each in before)
    deadline = time.monotonic() + 10
    while True:
        threads, files = held(engine)
        left = []
        if threads.total() > n_threads:
            left += (threads - before[0]).elements()
        if files.total() > n_files:
            left += (files - before[1]).elements()
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.1)
        gc.collect()


def at_the_end(options, out):
    """A map in a handler of atexit; another one, of a daemon thread, is at work then."""
    results = list(tp_runner.map(abs, [-1], n_workers=1, **options))
    with Path(out).open("a", buffering=1) as file:
        file.write(json.dumps(["at exit", "atexit", results == [1], results]) + "\n")


def read_for_ever():
    for _ in tp_runner.map(abs, iter(int, 1), n_workers=1):
        time.sleep(0.001)


def main():
    out, engines = os.environ["SWEEP_OUT"], os.environ["SWEEP_ENGINES"].split()
    with Path(out).open("a", buffering=1) as file:
        for engine in engines:
            options = ENGINES[engine]
            list(tp_runner.map(abs, [1], n_workers=1, **options))  # a fork server stays, and what is imported
            for kind, usual in KINDS.items():
                before = held(engine)
                try:
                    found = kind(dict(options))
                except BaseException as error:  # noqa: BLE001 - it is written down
                    found = f"{type(error).__name__}: {error}"[:300]
                expected = usual.get(engine, usual[""]) if isinstance(usual, dict) else usual
                print(json.dumps([engine, kind.__name__, found == expected, str(found)]), file=file)
                left = left_behind(before, engine)
                print(json.dumps([engine, "left", not left, f"{left} by {kind.__name__}"]), file=file)
    threading.Thread(target=read_for_ever, daemon=True).start()
    time.sleep(0.5)
    atexit.register(at_the_end, ENGINES[engines[0]], out)


def test_all_kinds():
    main()


if __name__ == "__main__":
    main()
