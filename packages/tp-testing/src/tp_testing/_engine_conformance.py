"""The conformance tests of engines, for their authors to subclass."""

import functools
import itertools
import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
from tp_core import resolve_devices
from tp_core.errors import ConfigError, TpError
from tp_core.plugins import Engine, Pool, Verdict

from tp_testing._kit import DeclaredLimits

MOST_READ_AHEAD = 100_000
"""More than any engine needs to keep its workers busy, and less than the endless input has."""


class EngineConformance(DeclaredLimits):
    """The tests of every engine. A subclass, in a test module, names the engine.

    A pool calls its ``worker`` with a device; the result is the function to apply to each item.

    Attributes:
        engine: The engine under test.
        devices: The devices of its workers.
        options: Options for the engine.
        patience_s: The seconds that one worker waits for another one to work, too; they meet in a folder
            that both must see.

    Example:
        >>> class TestMine(EngineConformance):
        ...     engine = MyEngine
    """

    engine: ClassVar[type[Engine]]
    devices: ClassVar[tuple[str, ...]] = ("cpu", "cpu")
    options: ClassVar[Mapping[str, Any]] = {}
    patience_s: ClassVar[float] = 60.0

    def subject(self) -> str:
        """Return the name of the engine."""
        return self.engine.name

    def open(self, worker: Callable[..., Any]) -> Pool:
        """Open a pool on the engine under test."""
        devices = resolve_devices(self.devices)
        return self.engine().open(worker, devices, options=self.options)

    def test_it_has_a_name_and_fits_the_devices(self) -> None:
        engine = self.engine()
        assert engine.name
        verdict = engine.assess(resolve_devices(self.devices))
        assert isinstance(verdict, Verdict)
        assert verdict.is_fit
        assert verdict.reason

    def test_an_unknown_option_is_refused(self) -> None:
        devices = resolve_devices(self.devices)
        options = {**self.options, "no_such_option": 1}
        with pytest.raises(ConfigError, match="no_such_option"):
            self.engine().open(_doubler, devices, options=options)

    @pytest.mark.parametrize("n_items", [0, 1, 7, 1000])
    def test_ordered_results_are_those_of_map(self, n_items: int) -> None:
        with self.open(_doubler) as pool:
            assert list(pool.run(range(n_items), ordered=True)) == [2 * i for i in range(n_items)]
            assert list(pool.run(iter(range(n_items)))) == [2 * i for i in range(n_items)]

    def test_unordered_results_are_the_same_ones(self) -> None:
        with self.open(_doubler) as pool:
            assert sorted(pool.run(range(500), ordered=False)) == [2 * i for i in range(500)]

    def test_each_worker_keeps_its_state(self) -> None:
        with self.open(_counter) as pool:
            counts = list(pool.run(range(200)))
        assert sum(1 for count in counts if count == 1) <= len(self.devices)
        assert max(counts) >= 200 / len(self.devices)

    def test_the_input_is_read_lazily_and_a_closed_iterator_leaves_the_pool_usable(self) -> None:
        n_read = 0

        def endless() -> Iterator[int]:
            nonlocal n_read
            for n_read in itertools.count(1):  # noqa: UP028 - it is looked at below
                yield n_read

        with self.open(_doubler) as pool:
            results = pool.run(endless())
            assert [next(results) for _ in range(10)] == [2 * i for i in range(1, 11)]
            assert n_read < MOST_READ_AHEAD
            close: Any = results
            close.close()
            assert list(pool.run(range(5))) == [0, 2, 4, 6, 8]

    def test_a_failed_item_is_named_and_the_pool_stays_usable(self) -> None:
        got: list[Any] = []
        with self.open(_doubler) as pool:
            with pytest.raises(TpError, match="wrong item"):
                got.extend(pool.run([1, 2, "wrong item", 4]))
            assert got == [2, 4]
            assert list(pool.run([5])) == [10]

    def test_an_input_that_raises_is_raised(self) -> None:
        def items() -> Iterator[int]:
            yield 1
            msg = "the input is broken"
            raise LookupError(msg)

        with self.open(_doubler) as pool:
            with pytest.raises(LookupError, match="the input is broken"):
                list(pool.run(items()))
            assert list(pool.run([5])) == [10]

    def test_several_workers_work_at_the_same_time(self, tmp_path: Path) -> None:
        with self.open(functools.partial(_meeter, tmp_path, self.patience_s)) as pool:
            met = list(pool.run(range(200)))
        assert all(met), "one worker waited in vain for another one to begin"

    def test_large_items_travel_both_ways(self) -> None:
        import torch

        tensors = [torch.arange(i, i + 1_000_000, dtype=torch.float64) for i in range(4)]  # (1e6,), 8 MB
        with self.open(_doubler) as pool:
            for item, result in zip(tensors, pool.run(tensors), strict=True):
                assert torch.equal(result, 2 * item)
            (text,) = pool.run([b"0123456789" * 1_000_000])
            is_whole = text == b"0123456789" * 2_000_000
        assert is_whole, "a text of 20 MB came back as another"

    def test_a_worker_that_dies_is_an_error_and_the_pool_stays_usable(self) -> None:
        with self.open(functools.partial(_dier, os.getpid())) as pool:
            for _ in range(2):
                with pytest.raises(TpError):
                    list(pool.run([1, 2, "die", 4]))
            assert list(pool.run([5, 6])) == [10, 12]

    def test_closing_twice_does_nothing_and_a_closed_pool_refuses(self) -> None:
        pool = self.open(_doubler)
        pool.close()
        pool.close()
        with pytest.raises(TpError):
            list(pool.run([1]))


def _doubler(device: Any) -> Callable[[Any], Any]:
    assert str(device)
    return _double


def _double(item: Any) -> Any:
    if isinstance(item, str):
        raise ValueError(item)
    return 2 * item


def _counter(device: Any) -> Callable[[Any], int]:
    assert str(device)
    count = itertools.count(1)
    return lambda _: next(count)


def _meeter(folder: Path, patience_s: float, device: Any) -> Callable[[Any], bool]:
    assert str(device)
    me = folder / uuid.uuid4().hex

    def meet(_: Any) -> bool:
        """Wait in the middle of this item for another worker to begin; return whether one has."""
        me.touch()
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline and not (folder / "in vain").exists():
            if len(list(folder.iterdir())) > 1:
                return True
            time.sleep(0.001)
        (folder / "in vain").touch()  # the other items need not wait, too
        return False

    return meet


def _dier(caller: int, device: Any) -> Callable[[Any], Any]:
    assert str(device)

    def work(item: Any) -> Any:
        if item == "die" and os.getpid() != caller:
            os._exit(3)
        return _double(item)  # a worker that is no process of its own cannot die: it fails

    return work
