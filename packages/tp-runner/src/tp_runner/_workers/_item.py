"""The worker and the item that this code runs for, and the random numbers of each."""

import contextlib
import functools
import importlib
import os
import sys
import threading
import types
import warnings
from collections.abc import Container, Iterable, Iterator, Mapping, MutableSequence
from typing import TYPE_CHECKING, Any, NamedTuple

from tp_core.random import seed_everything, seed_of

from tp_runner._options import Settings

if TYPE_CHECKING:
    from tp_runner._workers._infos import ItemInfo, WorkerInfo


# -- The worker -------------------------------------------------------------------------------


class WorkerIdentity(NamedTuple):
    """What :class:`WorkerInfo` says of a worker: a dataclass, which is made for who asks alone."""

    number: int
    n_workers: int
    device: str
    seed: int | None


# Of a worker process, for threads that the work starts. A thread worker has its own, in the thread.
_process_identity: WorkerIdentity | None = None
_thread_local = threading.local()


def worker() -> "WorkerInfo | None":
    """Return the worker that the caller runs in; ``None`` outside of all workers.

    Example:
        >>> def shard(items):
        ...     me = tp_runner.worker()
        ...     return items[me.number :: me.count]
    """
    identity = getattr(_thread_local, "identity", None) or _process_identity
    if identity is None:
        return None
    from tp_runner._workers._infos import WorkerInfo

    return WorkerInfo(*identity)


def become_worker(identity: WorkerIdentity) -> None:
    """Make this process a worker, and give it random numbers of its own.

    With a seed every worker begins with the same ones, so that a model that each of them makes is the
    same; its items are seeded one by one. Without one, no two workers, of any run, have the same.
    """
    global _process_identity  # noqa: PLW0603 - it is about the process
    _process_identity = _thread_local.identity = identity
    if identity.seed is None:
        # Libraries that are loaded later seed themselves from the system.
        seed_everything(int.from_bytes(os.urandom(8)) >> 1, load=False)
    else:
        import_generators()
        seed_generators(identity.seed)


@contextlib.contextmanager
def worker_context(identity: WorkerIdentity, task: "WorkerTask | None" = None) -> Iterator[None]:
    """Act as a worker in this thread for a while, at work on a task; also in the midst of another item."""
    before = dict(vars(_thread_local))
    _thread_local.identity = identity
    if task is not None:
        _thread_local.task = task
    try:
        yield
    finally:
        vars(_thread_local).clear()
        vars(_thread_local).update(before)


def import_generators() -> None:
    """Import numpy and torch before they are seeded: imported later, they would begin with any state."""
    for name in ("numpy", "torch"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def seed_generators(*key: int) -> None:
    """Seed Python's generator by some numbers, and numpy's and torch's where they are loaded."""
    seed_everything(seed_of(key))


# -- The item ---------------------------------------------------------------------------------

_OWN = 1  # in the key of an item's own seed, which the global generators' seed must not equal


class WorkerTask:
    """The current work of a worker: the chunk, and by its board the place in it.

    Args:
        settings: How the runner is run.
        board: Words that the parent reads while the worker works. The second one becomes the place in the
            chunk of the item at work, the third one the time at which it began, in nanoseconds.
        cancelled: The numbers of cancelled runs.
        seeds_globals: Whether the generators of Python, numpy and torch are this worker's own to seed.
    """

    def __init__(
        self,
        settings: Settings,
        board: MutableSequence[int],
        cancelled: Container[int],
        *,
        seeds_globals: bool = True,
    ) -> None:
        self.board = board
        self.timeout_s = settings.timeout_s
        self.batching = settings.batching
        # their seed, beside each item's place; ``None`` to leave them alone
        self.global_seed = settings.seed if seeds_globals else None
        self._seed = settings.seed
        self.start = 0  # the place of the chunk's first item in the input
        self.was_asked = False  # whether the work has asked which item it is at
        self._entropy = settings.entropy
        self._cancelled = cancelled
        self._run = self._attempt = 0
        self._is_at_work = False
        self._item: ItemInfo | None = None

    def begin(self, start: int, run: int, attempt: int) -> None:
        """Note which chunk is next."""
        self.start, self._run, self._attempt = start, run, attempt
        self._item, self._is_at_work = None, True

    def end(self) -> None:
        """Note that no item is worked on."""
        self._item, self._is_at_work = None, False

    def is_cancelled(self) -> bool:
        """Return whether nobody wants the results of this chunk any more."""
        return self._run in self._cancelled

    def item(self) -> "ItemInfo | None":
        """Return the item at work, by the same object for the same item."""
        if not self._is_at_work:
            return None
        self.was_asked = True
        index = self.start + self.board[1]
        if self._item is None or self._item.index != index:
            from tp_runner._workers._infos import ItemInfo, ItemRng

            key = (self._entropy, self._run) if self._seed is None else (self._seed,)
            seed = seed_of((*key, index, _OWN))
            if self.timeout_s is None:
                deadline = None
            else:
                deadline = self.board[2] / 1e9 + self.timeout_s
            run, cancelled = self._run, self._cancelled
            self._item = ItemInfo(
                index, self._attempt, seed, ItemRng(seed), deadline, lambda: run in cancelled
            )
        return self._item


_process_task: WorkerTask | None = None


def item() -> "ItemInfo | None":
    """Return the item at work in the caller's worker; ``None`` where there is none.

    Example:
        >>> def noisy(x):
        ...     return x + tp_runner.item().rng.random.random()
        >>> noise = [list(tp_runner.map(noisy, [0, 0], seed=1, n_workers=n, engine="thread")) for n in (1, 2)]
        >>> noise[0] == noise[1]
        True
    """
    task: WorkerTask | None = getattr(_thread_local, "task", None) or _process_task
    if task is None:
        return None
    return task.item()


def set_current_task(task: WorkerTask, *, of_process: bool = False) -> None:
    """Make :func:`tp_runner.item` use a task in this thread, or in all threads of a worker process."""
    global _process_task  # noqa: PLW0603 - it is about the process
    if of_process:
        _process_task = task
    else:
        _thread_local.task = task


# -- The search for generators that are copied to workers -------------------------------------

_MOST = 50  # this many functions are inspected, so that a start of workers does not take long
_STANDARD = os.path.dirname(os.__file__)  # noqa: PTH120 - it is compared as text


def warn_of_copied_generators(works: Iterable[Any], cfg: Any = None, *, stacklevel: int) -> None:
    """Warn once of generators that would be copied to each worker, such as one at module level."""
    copied = sorted(_GeneratorSearch(works, cfg).copied)
    if copied:
        warnings.warn(
            f"the work draws from {', '.join(copied)}: each worker process has a copy, and the copies "
            "give the same numbers; draw from tp_runner.item().rng instead",
            RuntimeWarning,
            stacklevel=stacklevel + 1,
        )


class _GeneratorSearch:
    def __init__(self, works: Iterable[Any], cfg: Any) -> None:
        self.copied: set[str] = set()  # the names of generators that each worker would copy
        self._seen: set[types.FunctionType] = set()
        self._names: set[str] = set()
        # Each worker has global generators of its own (`_inst`, `_rand`: private names). SystemRandom has no
        # state to copy.
        self._kinds: tuple[type, ...] = ()
        self._system: type | tuple[type, ...] = ()
        self._excluded: list[Any] = []
        python: Any = sys.modules.get("random")
        numpy: Any = sys.modules.get("numpy.random")
        torch: Any = sys.modules.get("torch")
        if hasattr(python, "SystemRandom"):
            self._kinds += (python.Random,)
            self._system = python.SystemRandom
            self._excluded.append(getattr(python, "_inst", None))
        if hasattr(numpy, "Generator"):  # or it is in the middle of being imported
            self._kinds += (numpy.Generator, numpy.RandomState)
            self._excluded.append(getattr(numpy.mtrand, "_rand", None))
        if hasattr(torch, "default_generator"):
            self._kinds += (torch.Generator,)
            self._excluded.append(torch.default_generator)
        for work in works:
            self._look(getattr(work, "__name__", type(work).__name__), work, is_work=True)
        of_cfg = cfg if isinstance(cfg, Mapping) else _attributes(cfg)
        for name in self._names & of_cfg.keys():
            self._look(f"cfg.{name}", of_cfg[name])

    def _look(self, name: str, value: Any, *, is_work: bool = False) -> None:
        """Inspect the value called ``name``, and its references."""
        kind = type(value)  # isinstance would call proxies, which may raise
        if issubclass(kind, types.BuiltinMethodType):  # draw = rng.random
            value, kind = value.__self__, type(value.__self__)
        if issubclass(kind, self._kinds):
            if not issubclass(kind, self._system) and not any(value is own for own in self._excluded):
                self.copied.add(repr(name))
        elif issubclass(kind, types.FunctionType):
            if value not in self._seen and len(self._seen) < _MOST and (is_work or not _is_installed(value)):
                self._seen.add(value)
                self._names.update(*(code.co_names for code in _codes(value.__code__)))
                for other, of in _references(value):
                    self._look(other, of)
        elif issubclass(kind, functools.partial):
            for of in (value.func, *value.args, *value.keywords.values()):
                self._look(name, of, is_work=is_work)
        elif issubclass(kind, types.MethodType):
            self._look(name, value.__func__, is_work=is_work)
            self._look(name, value.__self__)
        elif not issubclass(kind, type | types.ModuleType):
            for other, of in _attributes(value).items():
                if issubclass(type(of), self._kinds):
                    self._look(f"{name}.{other}", of)
            if callable(value) and issubclass(type(kind.__call__), types.FunctionType):
                self._look(name, kind.__call__)


def _references(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the values that a function refers to: globals, attributes of modules, closures, defaults."""
    for code in _codes(function.__code__):
        if function.__globals__.keys().isdisjoint(code.co_names):
            continue
        import dis  # no start of workers with simpler work waits for it

        # The names include attributes: only an instruction says that one is a global's.
        for name in {step.argval for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL"}:
            value = function.__globals__.get(name)
            yield name, value
            if issubclass(type(value), types.ModuleType):
                for attribute in vars(value).keys() & code.co_names:
                    yield f"{name}.{attribute}", vars(value)[attribute]
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # there is nothing in it yet
            yield name, cell.cell_contents
    yield from (function.__kwdefaults__ or {}).items()
    for value in function.__defaults__ or ():
        yield "a default argument", value


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield the code of a function and of those inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _attributes(value: Any) -> Mapping[str, Any]:
    try:
        return dict(vars(value))
    except Exception:  # noqa: BLE001 - it has none, or is a proxy of what is not there
        return {}


def _is_installed(function: types.FunctionType) -> bool:
    """Return whether a function is from the standard library or an installed package."""
    file = function.__code__.co_filename
    return "site-packages" in file or file.startswith((_STANDARD, "<frozen"))
