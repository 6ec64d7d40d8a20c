"""Loggers that write files: what they promise of every logger, and of files."""

import csv
import json
import os

import pytest
from tp_core.errors import ConfigError, StateError
from tp_testing import LoggerConformance
from tp_trainer.loggers import CsvLogger, JsonLinesLogger, RunInfo, read_run

from tests.tp_trainer.small_run import names


class TestCsv(LoggerConformance):
    def make(self, folder):
        return CsvLogger(folder)

    def read(self, folder):
        found = {}
        with (folder / "metrics.csv").open(newline="") as file:
            for row in csv.DictReader(file):
                for name, value in row.items():
                    if name not in {"step", "epoch"} and value:
                        found.setdefault(name, []).append((int(row["step"]), float(value)))
        return found


class TestJsonLines(LoggerConformance):
    def make(self, folder):
        return JsonLinesLogger()  # into the folder of the run

    def read(self, folder):
        run = read_run(folder)
        return {name: list(zip(*run.series(name), strict=True)) for name in run.names}

    def read_hyperparameters(self, folder):
        return read_run(folder).info["hyperparameters"]


FILES = {CsvLogger: "metrics.csv", JsonLinesLogger: "log.jsonl"}
each = pytest.mark.parametrize("kind", FILES)


def write(logger, steps, *, state=None, **info):
    if state is not None:
        logger.load_state_dict(state)
    logger.open(RunInfo(**info))
    for step in steps:
        logger.log({"loss": float(step), "a name": 0.5}, step=step, epoch=1)
    logger.flush()
    return logger


def steps_of(kind, folder):
    if kind is CsvLogger:
        return [step for step, _ in TestCsv().read(folder)["loss"]]
    return read_run(folder).series("loss")[0]


@each
def test_wherever_the_last_line_was_cut_off_the_file_is_read_and_gone_on_with(kind, tmp_path):
    killed = write(kind(tmp_path), range(1, 5))
    path = tmp_path / FILES[kind]
    whole, state = path.read_bytes(), killed.state_dict()
    killed.close("failed")
    begins = whole.rstrip().rfind(b"\n") + 1
    for end in range(begins, len(whole)):
        path.write_bytes(whole[:end])
        if kind is JsonLinesLogger:
            assert steps_of(kind, tmp_path)[:3] == [1, 2, 3]
        write(kind(tmp_path), [4, 5], state=state, resumed=True, step=3).close("finished")
        assert steps_of(kind, tmp_path) == [1, 2, 3, 4, 5]


@each
def test_a_run_that_begins_anew_keeps_the_files_before(kind, tmp_path):
    for n in range(3):
        write(kind(tmp_path), range(n + 1)).close("finished")
    path = tmp_path / FILES[kind]
    assert steps_of(kind, tmp_path) == [0, 1, 2]
    assert path.with_name(f"{path.stem}-1{path.suffix}").exists()
    assert path.with_name(f"{path.stem}-2{path.suffix}").exists()


@each
def test_every_row_is_there_before_the_file_is_closed(kind, tmp_path):
    logger = write(kind(tmp_path), [1, 2])
    assert steps_of(kind, tmp_path) == [1, 2]
    logger.close("finished")


@each
def test_a_lock_stays_only_where_a_resumed_run_must_find_its_file(kind, tmp_path):
    run, apart = tmp_path / "run", tmp_path / "apart"
    write(kind(tmp_path / "alone"), [1]).close("finished")
    write(kind(run), [1], folder=run).close("finished")
    write(kind(apart), [1], folder=run).close("finished")
    assert names(tmp_path / "alone") == names(run) == [FILES[kind]]
    assert names(apart) == [f".{FILES[kind]}.lock", FILES[kind]]
    write(kind(run), [2], folder=run, resumed=True, step=1).close("finished")
    assert steps_of(kind, run) == [1, 2]


@each
def test_without_a_folder_the_message_says_where_to_give_one(kind):
    with pytest.raises(ConfigError, match=rf"no folder to log to; give {kind.__name__}\(folder\)"):
        kind().open(RunInfo())


def test_a_csv_file_without_rows_waits_for_no_disk(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", synced.append)
    logger = CsvLogger(tmp_path)
    logger.open(RunInfo())
    logger.log({"loss": 1.0}, step=1, epoch=1)
    logger.flush()
    assert not synced
    logger.log({"val_loss": 2.0}, step=2, epoch=1)  # a further column: the row before it must survive
    logger.close("finished")
    assert len(synced) == 2  # the file, and its name in the folder
    assert (tmp_path / "metrics.csv").read_text().split() == [
        "step,epoch,loss,val_loss",
        "1,1,1.0,",
        "2,1,,2.0",
    ]


def test_a_csv_file_of_something_else_is_not_touched(tmp_path):
    path = tmp_path / "metrics.csv"
    path.write_text("name,age\nAda,36\n")
    with pytest.raises(StateError, match="its columns are name, age"):
        CsvLogger(tmp_path).open(RunInfo(resumed=True, step=1))
    assert path.read_text() == "name,age\nAda,36\n"


def test_a_record_has_starts_events_and_the_end_of_every_part_of_a_run(tmp_path):
    logger = write(JsonLinesLogger(tmp_path), [1, 2])
    logger.event("checkpoint", {"path": tmp_path}, step=2, epoch=1)
    logger.close("interrupted")
    assert read_run(tmp_path).status == "interrupted"
    state = logger.state_dict()
    logger = write(JsonLinesLogger(tmp_path), [2], state=state, resumed=True, step=1, versions={"torch": "2"})
    assert read_run(tmp_path).status == "running or killed"
    logger.close("finished")
    run = read_run(tmp_path / "log.jsonl")
    assert [line["type"] for line in run.lines] == ["run", "numbers", "event", "end", "run", "numbers", "end"]
    assert [line["step"] for line in run.of_type("run")] == [0, 1]
    assert run.of_type("event")[0]["facts"] == {"path": str(tmp_path)}
    assert run.info["versions"] == {"torch": "2"}
    assert run.status == "finished"


def test_lines_that_cannot_be_read_are_counted_and_later_kinds_are_kept(tmp_path):
    write(JsonLinesLogger(tmp_path), [1, 2]).close("finished")
    path = tmp_path / "log.jsonl"
    with path.open("a") as file:
        file.write('{"type":"numbers","time":1.0}\n[]\nnot json\n{"type":"later","time":2.0,"what":1}\n{"ty')
    run = read_run(tmp_path)
    assert run.unreadable == 4
    assert [line["what"] for line in run.of_type("later")] == [1]
    assert run.series("loss") == ([1, 2], [1.0, 2.0])


def test_every_line_is_json_for_other_readers(tmp_path):
    logger = JsonLinesLogger(tmp_path)
    logger.open(RunInfo(folder=tmp_path, hyperparameters={"rate": float("inf"), "of": (1, {2})}))
    logger.log({"loss": float("nan")}, step=1, epoch=1)
    logger.close("failed")

    def refuse(name):
        raise AssertionError(name)

    text = (tmp_path / "log.jsonl").read_text()
    lines = [json.loads(line, parse_constant=refuse) for line in text.splitlines()]
    assert lines[0]["hyperparameters"] == {"rate": "Infinity", "of": [1, "{2}"]}
    assert lines[1]["numbers"] == {"loss": "NaN"}


def test_what_is_no_record_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"has no log\.jsonl, the record that a run leaves"):
        read_run(tmp_path)
    (tmp_path / "log.jsonl").write_text("hello\n")
    with pytest.raises(StateError, match="no line that could be read"):
        read_run(tmp_path)
