"""How items flow: lazily, within bounds, and results as soon as they are there."""

import asyncio
import itertools
import threading
import time

import numpy as np
import pytest
import torch
import tp_runner
from tp_runner import OrderedRunner, RunnerClosedError, UnorderedRunner, WorkerError

ENGINES = [{"start_method": "fork"}, {"engine": "thread"}]
IDS = ["process", "thread"]


class Counted:
    """An endless input that knows how far it was read."""

    def __init__(self, make=lambda i: i):
        self.n_read = 0
        self._make = make

    def __iter__(self):
        while True:
            self.n_read += 1
            yield self._make(self.n_read - 1)


class Same(OrderedRunner):
    @staticmethod
    def producer_work(device, cfg, item):
        return item


class SlowFirst(OrderedRunner):
    @staticmethod
    def producer_work(device, cfg, item):
        time.sleep(1.0 if item == 0 else 0)
        return item


class Unordered(UnorderedRunner):
    pass


@pytest.mark.parametrize(("options", "scale"), [(ENGINES[0], 1), (ENGINES[1], 3), (ENGINES[0], 10)])
def test_queue_scale_bounds_what_is_on_its_way(options, scale):
    items = Counted()
    with Same(2, None, scale, **options) as runner:
        for n, _ in enumerate(itertools.islice(runner.stream(items), 300)):
            # What is on its way, what the reader holds ready, and the chunk being consumed.
            assert items.n_read - n <= 2 * (2 * scale + 2)


@pytest.mark.parametrize("options", ENGINES, ids=IDS)
def test_a_slow_consumer_is_not_overrun_without_a_bound(options, monkeypatch):
    items, now = Counted(), 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)  # all time that goes by is the consumer's
    with Same(2, **options) as runner:
        for n, result in enumerate(itertools.islice(runner.stream(items), 200)):
            assert result == n
            # Sixteen chunks of one item for each worker, and what the reader holds ready; Pool reads all.
            assert items.n_read - n <= 2 * 16 + 4
            now += 0.01


@pytest.mark.parametrize("options", ENGINES, ids=IDS)
def test_a_slow_first_item_does_not_let_the_rest_pile_up(options):
    items = Counted()
    with SlowFirst(2, None, 50, **options) as runner:
        stream = runner.stream(items)
        assert next(stream) == 0
        assert items.n_read <= 2 * (2 * 50 + 50)
        stream.close()


def test_bytes_are_bounded_too():
    items = Counted(lambda i: np.full(1 << 17, i))  # 1 MiB each
    with Same(2, max_bytes=16 << 20, start_method="fork") as runner:
        for n, array in enumerate(itertools.islice(runner.stream(items), 60)):
            time.sleep(0.005)
            assert array[0] == n
            assert items.n_read - n < 40


@pytest.mark.parametrize(("options", "kind"), [(ENGINES[0], Same), (ENGINES[1], Unordered)], ids=IDS)
def test_results_come_while_the_input_blocks(options, kind):
    go_on = threading.Event()

    def items():
        yield from range(5)
        assert go_on.wait(800)
        yield 5

    with kind(2, **options) as runner:
        stream = runner.stream(items())
        assert sorted(itertools.islice(stream, 5)) == [0, 1, 2, 3, 4]
        go_on.set()
        assert list(stream) == [5]


def test_while_one_worker_is_held_up_the_other_does_the_rest(tmp_path):
    def work(item):
        if item == 0:  # over when most of the others are
            while len(list(tmp_path.iterdir())) < 50:
                time.sleep(0.01)
        else:
            (tmp_path / str(item)).touch()
        return item

    assert list(tp_runner.map(work, range(60), devices=2)) == list(range(60))


# -- arrays and tensors ------------------------------------------------------------------------


def strides_without_gaps(value):
    """Return the strides of a tensor or an array, or of one in the same order of dimensions without gaps."""
    size, strides = value.itemsize, getattr(value, "strides", None)
    if strides is None:
        size, strides = 1, value.stride()
    if 0 in value.shape:
        return strides
    packed = [0] * len(strides)
    for dim in sorted(range(len(strides)), key=lambda dim: abs(strides[dim])):
        if strides[dim]:
            packed[dim] = size if strides[dim] > 0 else -size
            size *= value.shape[dim]
    # A dimension of one element has any stride, which stays where there are no gaps.
    pairs = zip(packed, strides, value.shape, strict=True)
    return tuple(stride if n == 1 else own for own, stride, n in pairs)


def named(tensor):
    tensor.label = "an attribute of its own"
    return tensor


@pytest.mark.parametrize("method", [pytest.param("fork", marks=pytest.mark.slow), "forkserver"])
@pytest.mark.parametrize(
    "make",
    [
        lambda i: np.full((300, 100), i, dtype=np.int16),
        lambda i: torch.full((300, 100), i),
        lambda i: torch.full((300, 100), i, dtype=torch.bfloat16),
        lambda i: torch.full((600, 100), i).t(),
        lambda i: torch.full((), i),
        lambda i: named(torch.full((5000,), i)),
        lambda i: torch.empty(0, i),
        lambda i: {"a": [torch.full((5000,), i), torch.full((3, 2), i), 2.5], "b": np.full(5000, i)},
        lambda i: np.asfortranarray(np.full((50, 60), i)),
        lambda i: np.full((100, 100), i)[::2, ::3],
        lambda i: torch.full((5000,), float(i), requires_grad=True),
        lambda i: (torch.arange(4800.0) + i).view(2, 6, 20, 20).to(memory_format=torch.channels_last),
        lambda i: torch.full((2, 1, 20, 20), float(i)).to(memory_format=torch.channels_last),
        lambda i: (torch.arange(3.0) + i).expand(400, 3),
        lambda i: (torch.arange(9000) + i).view(3, 1500, 2).permute(2, 0, 1),
        lambda i: (torch.arange(9000) + i).view(3, 1500, 2)[:, ::7].permute(2, 0, 1),
        lambda i: (np.arange(9000) + i)[::-1],
        lambda i: np.broadcast_to(np.arange(3) + i, (400, 3)),
        lambda i: (np.arange(9000) + i).reshape(3, 1500, 2).transpose(2, 0, 1)[:, ::-1],
    ],
    ids=[
        "array",
        "tensor",
        "bfloat16",
        "transposed",
        "scalar",
        "named",
        "empty",
        "nested",
        "fortran",
        "strided",
        "grad",
        "channels last",
        "channels last, one channel",
        "expanded",
        "permuted",
        "permuted, with gaps",
        "reversed",
        "broadcast",
        "permuted, reversed",
    ],
)
def test_arrays_and_tensors_arrive_as_they_were(method, make):
    items = [make(i) for i in range(20)]
    for got, item in zip(
        tp_runner.map(lambda x: x, items, devices=2, start_method=method), items, strict=True
    ):
        if isinstance(item, np.ndarray):
            np.testing.assert_array_equal(got, item)
        else:
            torch.testing.assert_close(got, item, rtol=0, atol=0)
        if isinstance(item, torch.Tensor):
            assert got.requires_grad == item.requires_grad
            assert vars(got) == vars(item)
            assert got.stride() == strides_without_gaps(item)
        elif isinstance(item, np.ndarray):
            assert got.strides == strides_without_gaps(item)
            assert got.flags.writeable == item.flags.writeable


def test_inputs_that_the_worker_keeps_stay_as_they_were():
    def keep(kept, array):
        kept.append(array)
        return [int(old[0]) for old in kept], len({int(old[-1]) for old in kept})

    arrays = (np.full(100_000, i) for i in range(40))
    for n, (firsts, n_lasts) in enumerate(tp_runner.map(keep, arrays, devices=1, init=lambda device: [])):
        assert firsts == list(range(n + 1))
        assert n_lasts == n + 1


def test_results_that_the_caller_keeps_stay_as_they_were():
    arrays = (np.full(100_000, i) for i in range(300))
    kept = list(tp_runner.map(np.negative, arrays, devices=2, max_bytes=32 << 20))
    assert all((array == -i).all() for i, array in enumerate(kept))


def test_results_far_larger_than_their_items_arrive():
    def grow(n):
        return np.full(n, n)

    sizes = [10, 5_000_000, 20, 3_000_000, 30]
    for array, n in zip(tp_runner.map(grow, sizes, devices=2), sizes, strict=True):
        assert array.shape == (n,)
        assert (array == n).all()


def test_results_may_be_changed_in_place():
    for i, array in enumerate(tp_runner.map(lambda x: x, (np.full(9999, i) for i in range(9)), devices=2)):
        np.add(array, 1, out=array)
        assert (array == i + 1).all()


@pytest.mark.slow
def test_many_small_tensors_need_few_descriptors(run_script):
    out = run_script(
        """
        import resource
        import torch
        import tp_runner
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        tensors = [torch.full((1000,), float(i)) for i in range(3000)]
        kept = list(tp_runner.map(torch.neg, tensors, devices=2))
        assert all((t == -i).all() for i, t in enumerate(kept))
        print("all")
        """
    )
    assert out == "all\n"


# -- batches -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "n_items"),
    [*((ENGINES[0], n) for n in (0, 1, 32, 1000)), (ENGINES[1], 33), ({"engine": "inline"}, 33)],
    ids=str,
)
def test_batches_are_put_together_and_taken_apart_in_order(options, n_items):
    def work(batch):
        assert batch.ndim == 2
        assert len(batch) <= 32
        return batch.sum(1)

    items = [torch.tensor([i, 1]) for i in range(n_items)]
    results = list(tp_runner.map(work, items, devices=2, batch=32, **options))
    assert [int(result) for result in results] == [i + 1 for i in range(n_items)]


def test_mappings_and_lists_of_results_are_taken_apart_too():
    def work(batch):
        return {"n": len(batch), "twice": [2 * item for item in batch]}

    with pytest.raises(WorkerError, match="must return a sequence, tensor, array or mapping with 2"):
        list(tp_runner.map(work, [1, 2], devices=1, batch=2, engine="thread"))

    def right(batch):
        return {"twice": [2 * item for item in batch], "item": batch}

    results = list(tp_runner.map(right, range(5), devices=1, batch=2, engine="thread"))
    assert results == [{"twice": 2 * i, "item": i} for i in range(5)]


def test_a_batch_with_too_few_results_is_an_error():
    with pytest.raises(WorkerError, match="a batch of 4 items returned 3 results"):
        list(tp_runner.map(lambda batch: batch[1:], range(4), devices=1, batch=4, engine="thread"))


def test_a_batch_is_collated_as_asked():
    results = tp_runner.map(
        lambda text: text.split(","), "abcd", devices=1, batch=3, collate=",".join, engine="thread"
    )
    assert list(results) == list("abcd")


def test_a_failed_batch_is_tried_again_item_by_item():
    def work(batch):
        if 7 in batch:
            raise ValueError(batch)
        return batch

    results = list(
        tp_runner.map(work, range(20), devices=2, batch=5, max_retries=1, on_error="return", engine="thread")
    )
    assert isinstance(results.pop(7), WorkerError)
    assert results == [i for i in range(20) if i != 7]


def test_an_incomplete_batch_goes_in_good_time():
    go_on = threading.Event()

    def items():
        yield from range(3)
        assert go_on.wait(800)

    class Lengths(OrderedRunner):
        @staticmethod
        def producer_work(device, cfg, batch):
            return [len(batch)] * len(batch)

    with Lengths(1, batch=8, max_wait_s=0.1) as runner:
        stream = runner.stream(items())
        lengths = list(itertools.islice(stream, 3))  # although the input gives no more
        assert max(lengths) <= 3  # fewer where the first were overdue before the last was read
        go_on.set()
        assert list(stream) == []


# -- from other threads and from asyncio -------------------------------------------------------


@pytest.mark.parametrize("options", [*ENGINES, {"engine": "inline"}], ids=[*IDS, "inline"])
def test_single_items_can_be_submitted(options):
    def work(device, cfg, item):
        return 10 // item

    kind = type("Divides", (OrderedRunner,), {"producer_work": staticmethod(work)})
    with kind(2, **options) as runner:
        futures = [runner.submit(item) for item in (1, 2, 0, 5)]
        assert [future.result(800) for future in futures[:2]] == [10, 5]
        with pytest.raises(WorkerError, match="ZeroDivisionError"):
            futures[2].result(800)
        assert futures[3].result(800) == 2
        assert list(runner.stream([1, 2])) == [10, 5]


def test_submitted_items_and_a_stream_share_the_workers():
    hold = threading.Event()
    kind = type("Waits", (OrderedRunner,), {"producer_work": staticmethod(lambda d, c, e: e and e.wait(800))})
    with kind(2, engine="thread") as runner:
        future = runner.submit(hold)
        assert list(runner.stream([None] * 100)) == [None] * 100
        assert not future.done()
        hold.set()
        assert future.result(800) is True


def test_futures_of_a_stopped_runner_fail():
    kind = type("Sleeps", (OrderedRunner,), {"producer_work": staticmethod(lambda d, c, s: time.sleep(s))})
    runner = kind(1)
    future = runner.submit(60)
    time.sleep(0.2)
    runner.stop()
    with pytest.raises(RunnerClosedError):
        future.result(800)


def test_a_paused_runner_hands_out_nothing():
    items = Counted()
    with Same(2, None, 2) as runner:
        stream = runner.stream(items)
        next(stream)
        runner.pause()
        resumed = threading.Event()

        def resume():
            resumed.set()
            runner.resume()

        threading.Timer(0.3, resume).start()
        for _ in itertools.islice(stream, 50):  # more than were on their way
            pass
        assert resumed.is_set()
        stream.close()


@pytest.mark.parametrize("options", ENGINES, ids=IDS)
def test_results_can_be_awaited(options):
    async def numbers():
        for i in range(50):
            await asyncio.sleep(0)
            yield i

    async def main(runner):
        direct = [result async for result in runner.astream(range(50))]
        awaited = [result async for result in runner.astream(numbers())]
        return direct, awaited

    with Same(2, **options) as runner:
        assert asyncio.run(main(runner)) == (list(range(50)), list(range(50)))


@pytest.mark.parametrize("pause", [0, 0.05], ids=["while it waits", "while it works"])
def test_a_task_that_reads_a_stream_can_be_cancelled_and_leaves_the_runner_free(pause):
    async def main(runner):
        async def consume():
            async for _ in runner.astream(itertools.repeat(0.01)):
                await asyncio.sleep(pause)

        with pytest.raises(TimeoutError):
            await asyncio.wait_for(consume(), 0.12)

    kind = type("Sleeps", (OrderedRunner,), {"producer_work": staticmethod(lambda d, c, s: time.sleep(s))})
    with kind(2) as runner:
        for _ in range(5):
            asyncio.run(main(runner))
            assert list(runner.stream([0.0])) == [None]


def test_a_stream_that_is_left_early_leaves_the_runner_free_for_the_next_one():
    async def main(runner):
        for _ in range(5):
            async for first in runner.astream(itertools.count()):
                assert first == 0
                break
        return [x async for x in runner.astream(range(3))]

    with Same(2) as runner:
        assert asyncio.run(main(runner)) == [0, 1, 2]
