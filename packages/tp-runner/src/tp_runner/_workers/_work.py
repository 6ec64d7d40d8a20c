"""Chunks of items at work, and the programs of workers: runner classes, functions or stages."""

import copy
import functools
import signal
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from tp_core.errors import ConfigError

from tp_runner._options import NOT_AWAITED, Batching, separate
from tp_runner._workers._failure import Failure
from tp_runner._workers._item import WorkerTask, seed_generators

# -- Chunks of items --------------------------------------------------------------------------


class Timing(NamedTuple):
    """The times of a worker for a chunk, in seconds; ``began`` is by the monotonic clock."""

    began: float = 0.0
    waited_s: float = 0.0
    worked_s: float = 0.0
    sent_s: float = 0.0


IDLE = -1
"""The first word of a worker's board when it works on no chunk."""

ENDING = -2
"""The same word while the worker ends, at the parent's request."""

MOST_UNASKED = 32
"""After at most so many items of a chunk the worker looks whether somebody still wants them."""
SLOW_NS = 1_000_000
"""With more work than this between two looks, the next one comes after one item."""

_UNAWAITED = (types.CoroutineType, types.AsyncGeneratorType)


def end_work(work: Any) -> Any:
    """Call the ``close`` attribute of a worker's work, where it has one, and return its value."""
    return getattr(work, "close", lambda: None)()


def run_chunk(work: Callable[[Any], Any], items: list[Any], task: WorkerTask) -> tuple[list[Any], bool]:
    """Apply ``work`` to each item; return the results and whether some are failures."""
    try:
        if task.is_cancelled():  # nobody will look at the results
            return [None] * len(items), False
        if task.batching is not None:
            return _run_batches(work, items, task, task.batching)
        return _run_items(work, items, task)
    finally:
        task.end()


def _run_items(work: Callable[[Any], Any], items: list[Any], task: WorkerTask) -> tuple[list[Any], bool]:
    results: list[Any] = []
    append = results.append
    failed = False
    board, seed, start = task.board, task.global_seed, task.start
    # Without a limit and a seed only the place is noted: this loop is the hot path of small items.
    is_plain = task.timeout_s is None and seed is None
    now = time.monotonic_ns
    n_unasked = 1
    while True:
        try:
            # In blocks: a chunk of items that take longer than those before must not outlive its stream.
            while len(results) < len(items):
                n_begun = len(results)
                if n_begun and task.is_cancelled():
                    return [None] * len(items), False
                block = enumerate(items[n_begun : n_begun + n_unasked], n_begun)
                began = now()
                if is_plain:
                    for board[1], item in block:
                        append(work(item))
                else:
                    for board[1], item in block:
                        if seed is not None:
                            seed_generators(seed, start + board[1])
                        board[2] = now()
                        append(work(item))
                is_slow = now() - began > SLOW_NS
                if is_slow:
                    n_unasked = 1
                else:
                    n_unasked = min(2 * n_unasked, MOST_UNASKED)
        except BaseException as error:
            if _is_interrupt(error):
                raise
            append(Failure.of(error))
            failed = True
            continue  # with the item after it
        return results, _refuse_unawaited(results, failed=failed)


def _run_batches(
    work: Callable[[Any], Any], items: list[Any], task: WorkerTask, batching: Batching
) -> tuple[list[Any], bool]:
    results: list[Any] = []
    failed = False
    board, seed = task.board, task.global_seed
    for start in range(0, len(items), batching.size):
        if start and task.is_cancelled():
            return [None] * len(items), False
        part = items[start : start + batching.size]
        if seed is not None:
            seed_generators(seed, task.start + start)
        board[1], board[2] = start, time.monotonic_ns()
        try:
            answer = work(batching.join(part))
            if type(answer) in _UNAWAITED:
                raise _not_awaited(answer)
            results += separate(answer, len(part))
        except BaseException as error:
            if _is_interrupt(error):
                raise
            results += [Failure.of(error)] * len(part)
            failed = True
    return results, failed


def _refuse_unawaited(results: list[Any], *, failed: bool) -> bool:
    """Replace coroutines and async generators by failures; return whether there are failures now."""
    # The last result stands for all, as work is of one kind; with failures each one is checked.
    if not results or not (failed or type(results[-1]) in _UNAWAITED):
        return failed
    for place, result in enumerate(results):
        if type(result) in _UNAWAITED:
            results[place] = Failure.of(_not_awaited(result), skip_frames=0)
            failed = True
    return failed


def _not_awaited(result: Any) -> TypeError:
    if type(result) is types.CoroutineType:
        result.close()  # or Python warns that it was never awaited
    return TypeError(NOT_AWAITED.format(name=result.__qualname__))


def _is_interrupt(error: BaseException) -> bool:
    """Return whether an interrupt is for this program; elsewhere the work itself has raised it."""
    return (
        isinstance(error, KeyboardInterrupt)
        and threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN  # as in a worker process
    )


# -- Configurations -----------------------------------------------------------------------------


class CfgNode(dict[str, Any]):
    """A dictionary with its keys as attributes too; nested mappings become nodes.

    Raises:
        AttributeError: An attribute is read that is not a key; the message names those that are.

    Example:
        >>> cfg = CfgNode({"model": {"width": 3}})
        >>> cfg.exponent = 2
        >>> cfg.model.width, cfg["exponent"]
        (3, 2)
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        for key, value in dict(*args, **kwargs).items():
            self[key] = _to_node(value)

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            names = ", ".join(map(str, self)) or "none"
            msg = f"no {name!r} in this configuration; there are: {names}"
            raise AttributeError(msg, name=name, obj=self) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def __delattr__(self, name: str) -> None:
        try:
            del self[name]
        except KeyError:
            msg = f"no {name!r} in this configuration"
            raise AttributeError(msg, name=name, obj=self) from None

    def __repr__(self) -> str:
        return f"CfgNode({dict(self)!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return CfgNode, (dict(self),)


def _to_node(value: Any) -> Any:
    if type(value) in {dict, types.MappingProxyType}:
        return CfgNode(value)
    return value


def copy_cfg(cfg: Any) -> Any:
    """Return a copy of a configuration that has attributes and takes new ones.

    An object that takes new attributes is copied as it is; a mapping, a frozen or slotted
    dataclass and a named tuple become a :class:`CfgNode`.
    """
    if cfg is None:
        return CfgNode()
    if isinstance(cfg, CfgNode):
        return _deep_copy(cfg)
    if isinstance(cfg, Mapping):
        return CfgNode(_deep_copy(dict(cfg)))
    if _is_namespace(cfg):
        return _deep_copy(cfg)
    import dataclasses  # here, and below: programs without a configuration do without

    if dataclasses.is_dataclass(cfg) and not isinstance(cfg, type):
        frozen = type(cfg).__dataclass_params__.frozen  # type: ignore[attr-defined]  # it has them
        if hasattr(cfg, "__dict__") and not frozen:
            return _deep_copy(cfg)
        fields = {field.name: getattr(cfg, field.name) for field in dataclasses.fields(cfg)}
        return CfgNode(_deep_copy(fields))
    if hasattr(cfg, "_asdict"):
        return CfgNode(_deep_copy(cfg._asdict()))
    if hasattr(cfg, "__dict__") and not isinstance(cfg, type) and not callable(cfg):
        return _deep_copy(cfg)
    msg = (
        f"cfg must be a mapping, a namespace, a dataclass or None, got {type(cfg).__name__}: "
        f"{cfg!r}; wrap it: cfg={{'value': ...}}"
    )
    raise ConfigError(msg)


def _is_namespace(value: Any) -> bool:
    argparse = sys.modules.get("argparse")  # a Namespace exists only where it was imported
    return isinstance(value, types.SimpleNamespace) or (
        argparse is not None and isinstance(value, argparse.Namespace)
    )


def _deep_copy(value: Any) -> Any:
    """Copy a value deeply, except objects that processes can only inherit: multiprocessing's locks, say."""
    try:
        return copy.deepcopy(value)
    except RuntimeError:  # what such objects raise; it may be a part of the value alone
        import dataclasses

        if isinstance(value, dict):
            mapping = CfgNode() if isinstance(value, CfgNode) else copy.copy(value)
            mapping.update({key: _deep_copy(part) for key, part in value.items()})
            return mapping
        if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
            return type(value)(_deep_copy(part) for part in value)
        if _is_namespace(value) or dataclasses.is_dataclass(value):
            new = copy.copy(value)
            for name, part in vars(value).items():
                object.__setattr__(new, name, _deep_copy(part))
            return new
        return value


# -- Programs ---------------------------------------------------------------------------------


class ClassProgram:
    """The producer's side of a runner class.

    Called with its device in each worker, it returns the function of an item. The worker calls the
    ``close`` attribute of that function at its end.
    """

    def __init__(self, producer: type, cfg: Any) -> None:
        self._producer: Any = producer
        self.cfg = cfg  # the configuration
        self.is_own = False  # whether this worker alone has it: then the configuration need not be copied

    @property
    def works(self) -> list[Any]:
        """The functions that workers call."""
        producer = self._producer
        return [producer.producer_init, producer.producer_work, producer.producer_end]

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, is_own=True)

    def __call__(self, device: str) -> Callable[[Any], Any]:
        cfg = self.cfg if self.is_own else copy_cfg(self.cfg)
        self._producer.producer_init(device, cfg)
        work = functools.partial(self._producer.producer_work, device, cfg)
        work.close = functools.partial(self._producer.producer_end, device, cfg)  # type: ignore[attr-defined]  # partial objects take attributes
        return work


class FunctionProgram:
    """The program of a plain function, with a function that makes its state."""

    def __init__(self, function: Callable[..., Any], init: Callable[[str], Any] | None) -> None:
        self._function = function
        self._init = init

    @property
    def works(self) -> list[Any]:
        return [self._function, self._init]

    def __call__(self, device: str) -> Callable[[Any], Any]:
        if self._init is None:
            return self._function
        return functools.partial(self._function, self._init(device))


MAP, FLAT_MAP, FILTER = "map", "flat_map", "filter"


class Stage(NamedTuple):
    """One step of a pipeline."""

    name: str  # its name in tables and errors
    kind: str  # ``MAP``, ``FLAT_MAP`` or ``FILTER``: how many results an item has
    function: Callable[..., Any]  # the work
    init: Callable[[str], Any] | None  # makes a worker's state, given its device
    batching: Batching | None  # how items are put together
    devices: tuple[str, ...] | None  # the devices of workers of its own; ``None`` for the shared workers


class StagesProgram:
    """The program of one or more stages; an item names its stage."""

    def __init__(self, stages: Mapping[int, Stage]) -> None:
        self._stages = stages

    @property
    def works(self) -> list[Any]:
        return [work for stage in self._stages.values() for work in (stage.function, stage.init)]

    def __call__(self, device: str) -> Callable[[tuple[int, Any]], list[Any]]:
        works = {place: _stage_work(stage, device) for place, stage in self._stages.items()}

        def work(payload: tuple[int, Any]) -> list[Any]:
            place, item = payload
            return works[place](item)

        return work


def _stage_work(stage: Stage, device: str) -> Callable[[Any], list[Any]]:
    """Return a function that makes the list of results of an item, or of a batch of items."""
    from tp_runner.errors import ItemError  # other workers need none: its import takes as long as many

    function: Callable[[Any], Any] = stage.function
    if stage.init is not None:
        state = stage.init(device)
        with_state = stage.function
        function = lambda item: with_state(state, item)  # noqa: E731 - it is the same as the one above
    batching = stage.batching

    def work(item: Any) -> list[Any]:
        if isinstance(item, ItemError):
            return [item]  # an item that failed before passes
        if stage.kind == FLAT_MAP:
            return list(function(item))
        if stage.kind == FILTER:
            if function(item):
                return [item]
            return []
        return [function(item)]

    def work_on_batch(items: list[Any]) -> list[Any]:
        good = [item for item in items if not isinstance(item, ItemError)]
        results: Iterator[Any] = iter(())
        if batching and good:
            results = iter(separate(function(batching.join(good)), len(good)))
        # Items that failed before pass, in their places.
        return [item if isinstance(item, ItemError) else next(results) for item in items]

    if batching is None:
        return work
    return work_on_batch
