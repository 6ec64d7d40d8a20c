"""What a script defines travels to workers, which do not run it; what cannot is named, with the remedy."""

import ast

import pytest

SCRIPT = """
import contextvars, ctypes, enum, functools, logging, socket, sqlite3, sys, threading, typing, warnings

import numpy as np
import torch
import tp_runner

warnings.simplefilter("ignore")  # torch.jit is deprecated

@functools.lru_cache
def load():
    return {"offset": 100}

@functools.cache
def fib(n):
    return n if n < 2 else fib(n - 1) + fib(n - 2)

@functools.singledispatch
def kind_of(x):
    return "any"

@kind_of.register
def _(x: list):
    return [kind_of(each) for each in x]

@kind_of.register
def _(x: int):
    return "int"

class Doc:
    def __init__(self, n):
        self.n = n

    @functools.cached_property
    def size(self):
        return self.n * 2

    @functools.lru_cache
    def plus(self, n):
        return self.n + n

    @functools.singledispatchmethod
    def add(self, other):
        return "any"

    @add.register
    def _(self, other: int):
        return self.n + other

class Single:
    lock = threading.Lock()
    one = None

    def __new__(cls):
        with cls.lock:
            if cls.one is None:
                cls.one = super().__new__(cls)
        return cls.one

class Missing:
    def __reduce__(self):
        return "MISSING"

MISSING = Missing()
UserId = typing.NewType("UserId", int)
Color = enum.Enum("Color", "RED GREEN")
LOCK, RLOCK, SEMAPHORE = threading.Lock(), threading.RLock(), threading.BoundedSemaphore(3)
SEMAPHORE.acquire()
EVENT, CONDITION, BARRIER = threading.Event(), threading.Condition(LOCK), threading.Barrier(1)
EVENT.set()
LOCAL = threading.local()
LOCAL.x = 1
CONTEXT, EMPTY = contextvars.ContextVar("context", default=1), contextvars.ContextVar("empty")
CHANGED = contextvars.ContextVar("changed", default=1)
CHANGED.set(2)
LIBRARY = ctypes.CDLL(None, use_errno=True)
LIBRARY.strtod.restype = ctypes.c_double
LOG = logging.getLogger("script")
SCRIPTED = torch.jit.script(torch.nn.Linear(2, 2))
OUT = sys.stdout

def use_lock(x):
    with LOCK:
        return x

def use_two(x):
    with RLOCK, CONDITION:
        return x, CONDITION._lock is LOCK

def use_semaphore(x):
    return [SEMAPHORE.acquire(blocking=False) for _ in range(3)]

def use_context(x):
    return CONTEXT.get(), EMPTY.get("none"), CHANGED.get()

def use_library(x):
    return LIBRARY.strtod(b"1.5", None)

def is_missing(x):
    return x is MISSING, MISSING

def write(x):
    OUT.write("")
    return OUT is sys.stdout

def twice(x):
    return 2 * x

FILE = open("/etc/hostname")
SOCKET, DATABASE = socket.socket(), sqlite3.connect(":memory:")
GENERATOR = (i for i in range(5))
UFUNC = np.frompyfunc(twice, 1, 1)
COMPILED = torch.compile(twice, backend="eager")

def use_indirectly(x):
    return use_file(x)

def use_file(x):
    return FILE.readline()

WORKS = [
    (lambda x: load()["offset"] + x, 1),
    (fib, 20),
    (lambda x: (kind_of(x), kind_of.registry.keys() >= {list, int}), [1, "a", [2]]),
    (lambda x: Doc(x).size, 2),
    (lambda doc: doc.size, Doc(3)),
    (Doc(1).plus, 4),
    (lambda x: Doc(x).add(2), 3),
    (lambda x: UserId(x), 5),
    (lambda x: (x.name, x is Color.RED), Color.RED),
    (use_lock, 6),
    (use_two, 7),
    (use_semaphore, 0),
    (lambda x: EVENT.is_set(), 0),
    (lambda x: BARRIER.wait(), 0),
    (lambda x: LOCAL.x, 0),
    (use_context, 0),
    (use_library, 0),
    (lambda x: LOG.name, 0),
    (lambda x: tuple(SCRIPTED(torch.ones(2)).shape), 0),
    (write, 0),
    (lambda x: np.vectorize(twice)([x])[0].item(), 4),
    (lambda x: Single() is Single(), 0),
    (use_file, 0),
    (use_indirectly, 0),
    (lambda x: SOCKET.fileno(), 0),
    (lambda x: DATABASE.execute("select 1"), 0),
    (lambda x: next(GENERATOR), 0),
    (lambda x: UFUNC(x), 0),
    (lambda x: COMPILED(x), 0),
]

if __name__ == "__main__":
    for work, item in WORKS:
        try:
            (result,) = tp_runner.map(work, [item], n_workers=1, start_method=sys.argv[1])
        except tp_runner.NotPicklableError as error:
            result = str(error)
        print(ascii(result))
    # Functions of several pickles share a lock, and there is one object that stands for a missing value.
    with tp_runner.Executor(1, start_method=sys.argv[1]) as executor:
        missing, back = executor.submit(is_missing, MISSING).result()
        executor.submit(lambda: LOCK.acquire()).result()
        is_held = executor.submit(lambda: LOCK.locked()).result()
        print(ascii((missing, back is MISSING, is_held)))
        try:
            executor.submit(lambda lock: None, threading.Lock()).result()
        except TypeError as error:
            print(ascii(str(error)))
        try:
            executor.submit(lambda path: open(path), "/etc/hostname").result()
        except TypeError as error:
            print(ascii(str(error)))
"""

RIGHT = [
    101, 6765, (["int", "any", ["int"]], True), 4, 6, 5, 5, 5, ("RED", True), 6, (7, True),
    [True, True, False], True, 0, 1, (1, "none", 2), 1.5, "script", (2,), True, 8,
    True,
]  # fmt: skip
REFUSED = [
    "because of use_file.<global FILE> (_io.TextIOWrapper): TypeError: an open file ('/etc/hostname')",
    "because of use_indirectly.<global use_file>.<global FILE>",
    "<global SOCKET>",
    "<global DATABASE>",
    "<global GENERATOR>",
    "<global UFUNC>",
    "<global COMPILED>",
]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_what_a_script_defines_travels_or_is_named(run_script, method):
    lines = run_script(SCRIPT, method).splitlines()
    found = [ast.literal_eval(line) for line in lines]
    assert found[: len(RIGHT)] == RIGHT
    texts = found[len(RIGHT) :]
    for text, expected in zip(texts[: len(REFUSED)], REFUSED, strict=True):
        assert expected in text
        assert "make it there, in init= or producer_init, or move what uses it into a module" in text
    identity, a_lock, a_file = texts[len(REFUSED) :]
    assert identity == (True, True, True)
    assert "cannot pickle '_thread.lock' object" in a_lock
    assert "an open file ('/etc/hostname')" in a_file
