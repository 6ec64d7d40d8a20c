"""What can be seen of the work: figures, a timeline, a bar, log records and warnings."""

import itertools
import json
import logging
import re
import time
import warnings

import pytest
import tp_runner
from tp_core.errors import ConfigError
from tp_runner import OrderedRunner, Pipeline, RunnerClosedError, RunnerStats


class Sleeps(OrderedRunner):
    @staticmethod
    def producer_work(device, cfg, item):
        time.sleep(0.01)
        return item


class Talks(OrderedRunner):
    @staticmethod
    def producer_init(device, cfg):
        warnings.simplefilter("always")  # a fork has pytest's filters, which raise
        logging.getLogger("talks.init").warning("loading on %s", device)

    @staticmethod
    def producer_work(device, cfg, item):
        logging.getLogger("talks").warning("item %d %s", item, object)
        logging.getLogger("talks").debug("never seen")
        try:
            1 / 0  # noqa: B018
        except ZeroDivisionError:
            logging.getLogger("talks").exception("it failed")
        warnings.warn("mind the gap", UserWarning, stacklevel=1)
        return item


@pytest.mark.parametrize(
    "engine", [{"start_method": "fork"}, {"engine": "thread"}, {"engine": "inline"}], ids=str
)
def test_the_figures_tell_what_each_worker_did(engine):
    began = time.perf_counter()
    with Sleeps(2, **engine) as runner:
        list(runner.stream(range(40)))
        stats = runner.stats()
    took_s = time.perf_counter() - began
    assert isinstance(stats, RunnerStats)
    assert stats.delivered == sum(worker.items for worker in stats.workers) == 40
    assert 0.4 <= sum(worker.working_s for worker in stats.workers) < 2 * took_s
    assert 0 < stats.rate < 200
    for worker in stats.workers:
        assert 0 < worker.utilization <= 1
        assert f"worker {worker.worker} on cpu: {worker.items} items" in str(stats)
    if engine != {"engine": "inline"}:
        assert all(worker.waiting_s > 0 for worker in stats.workers)


def test_every_stream_tells_what_its_workers_did():
    mapped = tp_runner.map(abs, range(5), n_workers=1, engine="thread")
    with pytest.raises(RunnerClosedError, match="no worker of this map has started: ask for a result"):
        mapped.stats()
    assert list(mapped) == list(range(5))
    assert mapped.stats().delivered == 5  # its workers have ended
    with Pipeline(n_workers=1, engine="thread").map(abs).filter(bool) as pipeline:
        stream = pipeline.stream(range(4))
        assert list(stream) == [1, 2, 3]
        assert [stage.given for stage in stream.stats()] == [4, 3]
    with OrderedRunner(1, engine="thread", progress=True) as runner:
        stream = runner.stream([1, 2])
        assert list(stream) == [1, 2]
        assert stream.stats().delivered == 2


def test_the_timeline_is_a_chrome_trace(tmp_path):
    with Sleeps(2, timeline=True, start_method="fork") as runner:
        list(runner.stream(range(20)))
        runner.write_timeline(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = [event["args"]["name"] for event in events if event["ph"] == "M"]
    assert names == ["worker 0 on cpu", "worker 1 on cpu"]
    work = [event for event in events if event["ph"] == "X" and event["name"] != "waiting"]
    assert sum(event["args"]["items"] for event in work) == 20
    assert all(event["dur"] >= 10_000 * event["args"]["items"] for event in work)
    for worker in (0, 1):
        mine = sorted((e["ts"], e["dur"]) for e in events if e["ph"] == "X" and e["tid"] == worker)
        for (ts, dur), (later, _) in itertools.pairwise(mine):
            assert ts + dur <= later + 1


def test_a_timeline_that_was_not_kept_is_refused(tmp_path):
    with Sleeps(1, engine="thread") as runner, pytest.raises(ConfigError, match="timeline=True"):
        runner.write_timeline(tmp_path / "trace.json")


@pytest.mark.parametrize("sized", [True, False])
def test_the_bar_shows_items_rate_and_how_busy_the_workers_are(monkeypatch, capsys, sized):
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    monkeypatch.setenv("COLUMNS", "120")
    with Sleeps(2, progress=True, engine="thread") as runner:
        items = range(40) if sized else (i for i in range(40))
        assert list(runner.stream(items)) == list(range(40))
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", capsys.readouterr().err)
    assert "40/40" in shown
    assert "/s" in shown
    assert "busy" in shown
    assert "%" in shown


@pytest.mark.parametrize(
    "method", ["fork", *(pytest.param(m, marks=pytest.mark.slow) for m in ("spawn", "forkserver"))]
)
def test_records_and_warnings_of_workers_reach_the_parents_logging(caplog, method):
    with caplog.at_level(logging.WARNING), Talks(2, start_method=method) as runner:
        assert list(runner.stream([5])) == [5]
    records = {record.name: record for record in caplog.records if record.levelno == logging.WARNING}
    assert records["talks.init"].getMessage() == "loading on cpu"
    assert records["talks"].getMessage() == "item 5 <class 'object'>"
    assert records["talks"].device == "cpu"
    assert records["talks"].worker in {0, 1}
    assert "mind the gap" in records["py.warnings"].getMessage()
    failed = next(record for record in caplog.records if record.levelno == logging.ERROR)
    assert "ZeroDivisionError" in failed.exc_text
    assert "never seen" not in caplog.text
