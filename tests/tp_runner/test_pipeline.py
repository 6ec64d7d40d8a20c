"""Pipelines: several stages at work at once, with none or several results for an item."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tp_runner import Pipeline, RunCancelledError, WorkerDiedError, WorkerError

ENGINES = [{"start_method": "fork"}, {"engine": "thread"}, {"engine": "inline"}]
IDS = ["process", "thread", "inline"]


def _fails_at_3(item):
    if item == 3:
        raise ValueError("no three")
    return item


@pytest.mark.parametrize("options", ENGINES, ids=IDS)
def test_stages_give_none_one_or_several_results_in_order(options):
    pipeline = Pipeline(n_workers=2, **options).flat_map(range).filter(lambda x: x % 2).map(str)
    expected = [str(x) for n in range(30) for x in range(n) if x % 2]
    with pipeline:
        assert list(pipeline.stream(range(30))) == expected
        assert list(pipeline.stream(iter([4]))) == ["1", "3"]
    assert list(pipeline.stream([2])) == ["1"]  # it starts again
    pipeline.close()


@pytest.mark.parametrize("options", ENGINES, ids=IDS)
def test_a_stage_works_on_batches_with_a_state_on_workers_of_its_own(options):
    def model(device):
        return lambda batch: batch.sum(1)

    def predict(state, batch):
        assert batch.shape[0] in {1, 4}
        return state(batch)

    pipeline = (
        Pipeline(n_workers=1, **options)
        .map(lambda i: torch.full((3,), float(i)))
        .map(predict, init=model, batch=4, n_workers=1)
        .map(float)
    )
    with pipeline:
        assert list(pipeline.stream(range(9))) == [3.0 * i for i in range(9)]
        _, predicting, last = pipeline.stats()
    assert (predicting.name, predicting.taken, predicting.given) == ("predict", 9, 9)
    assert not predicting.is_shared
    assert last.devices == ("cpu",)


def test_a_slow_stage_holds_up_the_input(wait_until):
    taken, gate, is_at_gate = [], threading.Event(), threading.Event()

    def numbers():
        for number in range(10_000):
            taken.append(number)
            yield number

    def pass_the_gate(number):
        is_at_gate.set()
        gate.wait()
        return number

    def takes_no_more():
        scheduler = pipeline._pools[1]._scheduler
        run = scheduler.runs[0]
        return scheduler._assignments.idlest(run.number, run.credits()) is None

    def reads_no_more(place=1):
        return pipeline._pools[place]._scheduler.runs[0].source._more._waiters

    def input_is_held_up():
        return reads_no_more(0)

    pipeline = Pipeline(engine="thread", queue_scale=2)
    pipeline = pipeline.map(abs, n_workers=1).map(pass_the_gate, n_workers=1)
    with pipeline, ThreadPoolExecutor(1) as reader:
        results = pipeline.stream(numbers())
        first = reader.submit(next, results)
        try:
            assert is_at_gate.wait(800)
            # Each of these stays so until the gate opens, and then nobody asks the one before it any more.
            for stands_still in (takes_no_more, reads_no_more, input_is_held_up):
                wait_until(lambda stands_still=stands_still: stands_still() or len(taken) == 10_000)
            assert len(taken) < 50
        finally:
            gate.set()
        assert first.result() == 0
        results.close()


@pytest.mark.parametrize("options", ENGINES, ids=IDS)
def test_an_error_says_in_which_stage_and_ends_all(options):
    pipeline = Pipeline(n_workers=2, **options).map(abs).map(_fails_at_3, name="check").map(abs)
    with pipeline:
        with pytest.raises(ValueError, match="no three") as caught:
            list(pipeline.stream(range(10)))
        assert "in the stage 'check' of the pipeline" in caught.value.__notes__
        assert list(pipeline.stream([1])) == [1]


@pytest.mark.parametrize("options", ENGINES, ids=IDS)
def test_a_returned_error_passes_by_the_later_stages(options):
    pipeline = Pipeline(n_workers=2, on_error="return", **options)
    pipeline = pipeline.map(_fails_at_3).filter(lambda x: True).map(lambda xs: [x * 2 for x in xs], batch=2)
    with pipeline:
        results = list(pipeline.stream(range(6)))
    assert [r for r in results if isinstance(r, int)] == [0, 2, 4, 8, 10]
    assert isinstance(results[3], WorkerError)
    assert "in the stage '_fails_at_3' of the pipeline" in results[3].__notes__


def test_deaths_are_mended_where_that_is_allowed_and_told_otherwise(tmp_path):
    def dies_once(path):
        if not path.exists():
            path.touch()
            os._exit(3)
        return path.name

    def go(name, **options):
        with Pipeline(n_workers=1, start_method="fork", **options).map(same).map(dies_once) as pipeline:
            return list(pipeline.stream([name]))

    def same(path):
        return path

    assert go(tmp_path / "a", max_restarts=3) == ["a"]
    with pytest.raises(WorkerDiedError, match="exit status 3") as caught:
        go(tmp_path / "b")
    assert "in the stage 'dies_once' of the pipeline" in caught.value.__notes__


def test_a_pipeline_is_cancelled_from_another_thread():
    def endless():
        yield 1
        block.wait(800)

    block = threading.Event()
    with Pipeline(n_workers=1, engine="thread").map(abs).map(abs) as pipeline:
        results = pipeline.stream(endless())
        assert next(results) == 1
        canceller = threading.Timer(0.05, results.cancel)
        canceller.start()
        with pytest.raises(RunCancelledError):
            next(results)
        block.set()
        canceller.join()


def test_errors_of_the_input_come_after_the_results():
    def items():
        yield 1
        raise OSError("the disk")

    with Pipeline(n_workers=1, engine="thread").map(abs).map(abs) as pipeline:
        results = pipeline.stream(items())
        assert next(results) == 1
        with pytest.raises(OSError, match="the disk"):
            next(results)


def test_results_may_come_as_they_are_ready():
    with Pipeline(n_workers=2, engine="thread", ordered=False).flat_map(range).map(str) as pipeline:
        assert sorted(pipeline.stream([3, 2, 1])) == ["0", "0", "0", "1", "1", "2"]


def test_a_table_shows_the_stages(capsys):
    with Pipeline(n_workers=2, engine="thread", progress=True).map(abs).filter(bool, name="keep") as pipeline:
        assert list(pipeline.stream([0, 1, 2])) == [1, 2]
    shown = capsys.readouterr().err
    assert "keep" in shown
    assert "2 cpu, shared" in shown
