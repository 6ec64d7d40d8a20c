"""Two of every writer at once, each killed at some moment: refused or separate, never mixed, never lost."""

import contextlib
import csv
import errno
import json
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tp_core.errors import ConfigError, StateError
from tp_core.files import write_atomically
from tp_launch import LaunchRequest
from tp_launch._jobs import create_job, damaged_jobs, list_jobs  # private: two writers meet in one moment
from tp_trainer import LogOptions, Trainer
from tp_trainer._checkpoint._folder import verify  # private: resuming would pass over a damaged one
from tp_trainer.loggers import CsvLogger, JsonLinesLogger, RunInfo, TensorBoardLogger, read_run

from tests.run_tp import run
from tests.tp_trainer import small_run

pytestmark = [
    # Children of a fork do one thing each and end.
    pytest.mark.filterwarnings("ignore:.*fork.*may lead to deadlocks:DeprecationWarning"),
]

ROWS = 40
ITEMS = 30
REFUSED = 3  # the exit status of a writer that was refused
TAGS = (1.0, 2.0)  # what the two writers write


class Model(torch.nn.Module):
    """Has one number everywhere, so that a mixture is seen."""

    def __init__(self, tag):
        super().__init__()
        for n in range(4):
            self.register_parameter(f"p{n}", torch.nn.Parameter(torch.full((64, 64), tag)))


@contextlib.contextmanager
def plain_trainer():
    with Trainer(seed=0, devices="cpu", backend="single", progress=False) as trainer:
        yield trainer


# -- writers: write(folder, tag), and check(folder, tags of those that ended well) --------------------


def log(logger, tag, **info):
    logger.open(RunInfo(**info))
    for step in range(1, ROWS + 1):
        logger.log({"tag": tag, f"column-{step // 10}": tag}, step=step, epoch=1)
        logger.flush()
        if step % 10 == 0:
            logger.state_dict()
        time.sleep(0.001)
    logger.close("finished")


def tables(folder):
    """Return the rows of each table, as the tags in them."""
    for path in folder.glob("metrics*.csv"):
        with path.open(newline="") as file:
            yield [float(row["tag"]) for row in csv.DictReader(file) if row.get("tag")]


def records(folder):
    for path in folder.glob("log*.jsonl"):
        lines = [
            json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")
        ]
        yield [line["numbers"]["tag"] for line in lines if line["type"] == "numbers"]


def event_files(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for place in [folder, *folder.parent.glob(f"{folder.name}-*")]:
        events = EventAccumulator(str(place), size_guidance={"scalars": 0}).Reload()
        if "tag" in events.Tags()["scalars"]:
            yield [event.value for event in events.Scalars("tag")]


def check_logs(found, ended):
    found = list(found)
    for tags in found:
        assert len({*tags}) <= 1, f"rows of two runs in one file: {tags}"
    for tag in ended:
        assert [tag] * ROWS in found, (
            f"rows of a run that ended well are lost: {[len(tags) for tags in found]}"
        )


def check_model(path, ended):
    if path.is_file():
        values = {float(value) for tensor in load_file(path).values() for value in tensor.unique()}
        assert len(values) == 1, f"weights of two runs in one file: {values}"
    assert path.is_file() or not ended


def export(folder, tag, *, most=None):
    with plain_trainer() as trainer:
        for _ in range(4):
            trainer.export(Model(tag), folder / "m.safetensors", max_file_nbytes=most)


def check_export(folder, ended):
    index = folder / "m.safetensors.index.json"
    if (folder / "m.safetensors").is_file():  # as readers look
        check_model(folder / "m.safetensors", ended)
    elif index.is_file():
        files = {*json.loads(index.read_text())["weight_map"].values()}
        values = {float(v) for name in files for t in load_file(folder / name).values() for v in t.unique()}
        assert len(values) == 1, f"weights of two runs in one model: {values}"
    else:
        assert not ended


def save_model(folder, tag):
    with plain_trainer() as trainer:
        for _ in range(4):
            trainer.save_model(Model(tag), folder / "m.pt")


def check_saved(folder, ended):
    path = folder / "m.pt"
    if path.is_file():
        values = {float(v) for tensor in torch.load(path).values() for v in tensor.unique()}
        assert len(values) == 1
    assert path.is_file() or not ended


def fit(folder, tag, *, log=None, background=False, checkpoints=True):
    small_run.train(
        folder / "run" if checkpoints else None,
        before=lambda _: time.sleep(0.005),
        **({"background": background} if checkpoints else {}),
    )


def check_fit(folder, ended):
    """Whatever happened, the next run ends as one that was alone."""
    for path in (folder / "run").glob("step-*"):
        verify(path)
    assert small_run.same(small_run.train(folder / "run"), small_run.train(None))


def start_job(folder, tag):
    os.environ["TP_STATE_DIR"] = str(folder / "state")
    create_job(LaunchRequest(script="x.py", name="same", args=("--token=hunter2",)))
    time.sleep(0.3)  # it is running


def check_jobs(folder, ended):
    os.environ["TP_STATE_DIR"] = str(folder / "state")
    assert damaged_jobs() == []
    jobs = list_jobs()
    assert len(jobs) >= len(ended)
    written = "".join(path.read_text() for path in folder.rglob("*.json"))
    assert "hunter2" not in written


def whole_file(folder, tag):
    def write(part):
        with part.open("w") as file:
            for _ in range(200):
                file.write(f"{tag}\n")
                file.flush()

    for _ in range(5):
        write_atomically(write, folder / "file")


def check_whole(folder, ended):
    if (folder / "file").is_file():
        lines = (folder / "file").read_text().split()
        assert len(lines) == 200
        assert len({*lines}) == 1
    assert (folder / "file").is_file() or not ended


def report(folder, tag):
    out, png = folder / "report.html", folder / "pictures"
    assert run(["report", str(folder.parent / "record"), "--out", str(out), "--png", str(png)]) == 0


def check_report(folder, ended):
    pages = [*folder.glob("report.html")]
    assert all(page.read_text().rstrip().endswith("</html>") for page in pages)
    assert pages or not ended
    for picture in folder.glob("pictures/*.png"):
        assert picture.read_bytes().endswith(b"IEND\xaeB`\x82")


def convert(folder, tag, *, most=""):
    given = ["convert", str(folder.parent / f"{tag}.pt"), str(folder / "m.safetensors"), "--overwrite"]
    status = run([*given, "--max-shard-size", most] if most else given)
    if status == 2:
        raise ConfigError("refused")
    assert status == 0


def sharded(folder, tag):
    from tp_shard import save_sharded

    for _ in range(3):
        save_sharded(Model(tag), folder / "m")


def check_sharded(folder, ended):
    from tp_core.errors import StateError
    from tp_shard import load_sharded

    model = Model(0.0)
    try:
        load_sharded(model, folder / "m")
    except (StateError, FileNotFoundError):
        assert not ended
    else:
        assert len({float(v) for p in model.parameters() for v in p.detach().unique()}) == 1


def tp_run(folder, tag, *, output):
    """``tp run`` in a process of its own, which a fork cannot be: it starts workers."""
    os.chdir(folder.parent)
    os.execv(sys.executable, command_of(folder, output))


EXEC = f"""
import sys
from unittest import mock
from tp_core.cli import main
mock.patch("tp_core.files._ownership.GRACE_S", 0.2).start()
try:
    main()
except SystemExit as end:
    sys.exit({REFUSED} if end.code == 2 else end.code)
"""


def command_of(folder, output):
    of_pictures = output == "out"
    return [
        *(sys.executable, "-c", EXEC, "run", f"work.py:{'paint' if of_pictures else 'work'}"),
        *("--input", "pictures" if of_pictures else "in.jsonl", "--output", str(folder / output)),
        *("--devices", "1", "--no-progress", "--format", "images" if of_pictures else "auto"),
    ]


def check_run(folder, ended, *, output):
    again = subprocess.run(
        command_of(folder, output),
        cwd=folder.parent,
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert again.returncode == 0, again.stderr
    if ended:
        assert "0 now" in again.stderr, again.stderr  # nothing that was done is lost
    (journal,) = folder.rglob("*.jsonl")
    rows = [json.loads(line) for line in journal.read_text().splitlines()]
    n = 5 if output == "out" else ITEMS
    assert len(rows) == len({(row["source"], row["line"]) for row in rows}) == n
    if output == "out.csv":
        with (folder / output).open(newline="") as file:
            assert [int(row["result"]) for row in csv.DictReader(file)] == [2 * i for i in range(ITEMS)]
    if output == "out.parquet":
        import pyarrow.parquet

        assert pyarrow.parquet.read_table(folder / output)["result"].to_pylist() == [
            2 * i for i in range(ITEMS)
        ]


def predict(folder, tag, *, name):
    with plain_trainer() as trainer:
        data = torch.utils.data.TensorDataset(torch.full((64, 3), tag))
        loader = torch.utils.data.DataLoader(data, batch_size=4)
        for _ in range(3):
            found = trainer.predict(torch.nn.Identity(), loader, step=lambda model, batch: model(batch[0]))
            found.save(folder / name)


def check_predicted(folder, ended, *, name):
    path = folder / name
    if path.is_file() and name.endswith("jsonl"):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        assert len(rows) == 64
        assert len({value for row in rows for value in row}) == 1
    elif path.is_file():
        check_model(path, ended)
    assert path.is_file() or not ended


def as_before(folder, tag):
    """One run whose log lies among its checkpoints, and one that was given that folder for its tables."""
    own = {"folder": folder} if tag == TAGS[0] else {}
    log(CsvLogger(None if own else folder), tag, **own)


def both_logs(folder, tag):
    loggers = [CsvLogger(folder), JsonLinesLogger(folder)]
    for logger in loggers:
        logger.open(RunInfo())
    for step in range(1, ROWS + 1):
        for logger in loggers:
            logger.log({"tag": tag}, step=step, epoch=1)
            logger.flush()
    for logger in loggers:
        logger.close("finished")


def check_both(folder, ended):
    check_logs(tables(folder), ended)
    check_logs(records(folder), ended)


def trace(folder, tag):
    from tp_trainer.callbacks import Profiler

    x = torch.randn(32, 3)
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), batch_size=4)
    model = torch.nn.Linear(3, 1)
    with plain_trainer() as trainer:
        trainer.fit(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            data,
            step=lambda model, batch: model(batch[0]).square().mean(),
            epochs=1,
            callbacks=[Profiler(folder, first_step=2, steps=2)],
        )


def check_traces(folder, ended):
    traces = [*folder.glob("steps-*.json")]
    assert all(json.loads(path.read_text())["traceEvents"] for path in traces)
    assert traces or not ended


WRITERS = {
    "csv": (lambda f, t: log(CsvLogger(f), t), lambda f, e: check_logs(tables(f), e)),
    "jsonl": (lambda f, t: log(JsonLinesLogger(f), t), lambda f, e: check_logs(records(f), e)),
    "csv in a run's folder": (as_before, lambda f, e: check_logs(tables(f), e)),
    "whole file": (whole_file, check_whole),
    "job of one name": (start_job, check_jobs),
    "csv and jsonl": (both_logs, check_both),
    "export": (export, check_export),
    "tensorboard": (lambda f, t: log(TensorBoardLogger(f), t), lambda f, e: check_logs(event_files(f), e)),
    "save_model": (save_model, check_saved),
    "export of several files": (lambda f, t: export(f, t, most=20_000), check_export),
    "export of one and several": (
        lambda f, t: export(f, t, most=20_000 if t == TAGS[0] else None),
        check_export,
    ),
    "checkpoints": (fit, check_fit),
    "checkpoints in the background": (lambda f, t: fit(f, t, background=True), check_fit),
    "report and pictures": (report, check_report),
    "convert": (convert, check_export),
    "convert to several": (lambda f, t: convert(f, t, most="20KB"), check_export),
    "convert to other sizes": (
        lambda f, t: convert(f, t, most="20KB" if t == TAGS[0] else "40KB"),
        check_export,
    ),
    "sharded": (sharded, check_sharded),
    "predictions as lines": (
        lambda f, t: predict(f, t, name="p.jsonl"),
        lambda f, e: check_predicted(f, e, name="p.jsonl"),
    ),
    "predictions as tensors": (
        lambda f, t: predict(f, t, name="p.safetensors"),
        lambda f, e: check_predicted(f, e, name="p.safetensors"),
    ),
    "traces": (trace, check_traces),
    **{
        f"tp run into {output}": (
            lambda f, t, output=output: tp_run(f, t, output=output),
            lambda f, e, output=output: check_run(f, e, output=output),
        )
        for output in ("out.jsonl", "out.csv", "out.parquet", "out")
    },
}


# -- two of them ---------------------------------------------------------------------------------------

WORK = """
import time

def work(item):
    time.sleep(0.005)
    return item["i"] * 2

def paint(picture):
    time.sleep(0.02)
    return picture
"""


def materials(place, name):
    """Lay out what a writer reads."""
    if name.startswith("convert"):
        for tag in TAGS:
            torch.save(Model(tag).state_dict(), place / f"{tag}.pt")
    if name.startswith("report"):
        log(JsonLinesLogger(place / "record"), 1.0)
    if name.startswith("tp run"):
        (place / "work.py").write_text(WORK)
        (place / "in.jsonl").write_text("".join(f'{{"i": {i}}}\n' for i in range(ITEMS)))
        (place / "pictures").mkdir()
        for n in range(5):
            from PIL import Image

            Image.new("RGB", (8, 8), (n, 0, 0)).save(place / "pictures" / f"{n}.png")


def start(name, folder, tag, output):
    """Fork a writer; it begins when the pipe that is returned is closed."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(reading)
        return pid, writing
    status = 1
    try:
        os.close(writing)
        for stream in (1, 2):
            os.dup2(output.fileno(), stream)
        pytest.MonkeyPatch().setattr("tp_core.files._ownership.GRACE_S", 0.2)
        torch.set_num_threads(1)  # those of the other process are not in this one
        os.read(reading, 1)
        WRITERS[name][0](folder, tag)
        status = 0
    except ConfigError as error:
        output.write(f"{error}\n")
        status = REFUSED
    except BaseException:  # noqa: BLE001 - nothing may go on as the test does
        traceback.print_exc(file=output)
    finally:
        output.flush()
        os._exit(status)


def end(pid):
    """Return how a process ended; one that hangs is killed."""
    deadline = time.monotonic() + 800
    while (found := os.waitpid(pid, os.WNOHANG))[0] == 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    if found[0] == 0:
        os.kill(pid, signal.SIGKILL)
        found = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(found[1])


def run_two(name, place, *, kill_after_s=None, victim=0):
    """Run two writers at once, then a third one, which must find the place free."""
    folder = place / "place"
    folder.mkdir(parents=True)
    materials(place, name)
    check = WRITERS[name][1]
    with (place / "output").open("w+") as output:

        def said():
            output.seek(0)
            return output.read()

        writers = [start(name, folder, tag, output) for tag in TAGS]
        for _, pipe in writers:
            os.close(pipe)
        if kill_after_s is not None:
            time.sleep(kill_after_s)
            os.kill(writers[victim][0], signal.SIGKILL)
        statuses = [end(pid) for pid, _ in writers]
        allowed = {0, REFUSED}
        for number, status in enumerate(statuses):
            killed = kill_after_s is not None and number == victim
            assert status in (allowed | {-signal.SIGKILL} if killed else allowed), said()
        ended = [tag for tag, status in zip(TAGS, statuses, strict=True) if status == 0]
        assert ended or kill_after_s is not None, said()
        if REFUSED in statuses:
            assert "is in use: " in said() or "is running" in said() or name.startswith("convert")
        check(folder, ended if kill_after_s is None else [])
        third, pipe = start(name, folder, TAGS[1], output)
        os.close(pipe)
        assert end(third) == 0, said()
        check(folder, [*ended, TAGS[1]])


FEW = ["csv in a run's folder", "whole file"]


@pytest.mark.parametrize("name", FEW)
def test_two_writers_at_once_are_refused_or_separate(tmp_path, name):
    run_two(name, tmp_path)
    chance = random.Random(name)
    run_two(name, tmp_path / "killed", kill_after_s=chance.uniform(0, 0.1), victim=chance.randrange(2))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("name", "kills"),
    [
        *((name, 1) for name in WRITERS if name not in FEW and not name.startswith("tp run")),
        # Each kill starts up to five programs, with workers of their own: the nightly part has them.
        ("tp run into out.jsonl", 0),
        *(pytest.param(name, 4, marks=pytest.mark.nightly) for name in WRITERS),
    ],
)
def test_two_writers_of_which_one_is_killed_lose_and_mix_nothing(tmp_path, name, kills):
    if name == "tensorboard":
        pytest.importorskip("tensorboard")
    chance = random.Random(name)
    run_two(name, tmp_path / "both")
    longest = 3.0 if name.startswith("tp run") else 0.3
    for number in range(kills):
        after = chance.uniform(0, longest)
        run_two(name, tmp_path / f"killed-{number}", kill_after_s=after, victim=chance.randrange(2))


# -- a full disk ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def full_disk(nbytes):
    """Let no file grow beyond some bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def log_much(logger):
    logger.open(RunInfo())
    try:
        with full_disk(5_000):
            for step in range(1, 3000):
                logger.log({"tag": 1.0}, step=step, epoch=1)
                if step % 100 == 0:
                    logger.flush()
                    logger.state_dict()
    finally:
        with contextlib.suppress(OSError):
            logger.close("failed")


def write_journal(folder):
    from tp_runner._command._journal import Journal  # private: a disk that is full at one write
    from tp_runner._command._records import Record

    with Journal(folder / "out.jsonl") as journal, full_disk(5_000):
        for n in range(1000):
            journal.write(Record("in.jsonl", n, "digest", None), n, keep_going=False)


FULL = {
    "metrics.csv": lambda folder: log_much(CsvLogger(folder)),
    "log.jsonl": lambda folder: log_much(JsonLinesLogger(folder)),
    "m.safetensors": lambda folder: limited(5_000, export, folder, 1.0),
    "m.pt": lambda folder: limited(5_000, save_model, folder, 1.0),
    "p.safetensors": lambda folder: limited(300, predict, folder, 1.0, name="p.safetensors"),
    "p.jsonl": lambda folder: limited(300, predict, folder, 1.0, name="p.jsonl"),
    "events": lambda folder: log_much(TensorBoardLogger(folder / "events")),
}


def limited(nbytes, write, *arguments, **options):
    with full_disk(nbytes):
        write(*arguments, **options)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("name", FULL)
def test_a_full_disk_is_an_error_of_the_system_with_its_file(tmp_path, name):
    if name == "events":
        pytest.importorskip("tensorboard")
    threads = set(threading.enumerate())
    with pytest.raises(OSError, match="File too large") as caught:
        FULL[name](tmp_path)
    # TensorBoard's own thread fails too, and may do so during the next test.
    for thread in set(threading.enumerate()) - threads:
        thread.join(60)
    assert (caught.value.errno, Path(caught.value.filename)) == (errno.EFBIG, tmp_path / name)


def test_results_that_find_no_room_are_named_with_their_file(tmp_path):
    with pytest.raises(StateError, match=rf"{tmp_path / 'out.jsonl'} cannot be written: .*File too large"):
        write_journal(tmp_path)


@pytest.mark.slow
def test_a_run_whose_folder_is_not_text_is_logged_and_reported(tmp_path, monkeypatch):
    place = tmp_path / "bad-\udcff-bytes"
    place.mkdir()
    monkeypatch.chdir(place)
    loggers = [CsvLogger(place), JsonLinesLogger(place), TensorBoardLogger(tmp_path / "events")]
    with plain_trainer() as trainer:
        trainer.fit(
            model := torch.nn.Linear(1, 1),
            torch.optim.SGD(model.parameters(), lr=0.1),
            torch.utils.data.DataLoader(torch.ones(4, 1), batch_size=2),
            step=lambda model, batch: model(batch).square().mean(),
            checkpoint=place / "run",
            epochs=1,
            log=LogOptions(loggers, every_steps=1),
        )
    assert read_run(place).status == "finished"
    assert run(["report", str(place), "--out", str(place / "page.html")]) == 0
    assert "finished" in (place / "page.html").read_text()
    assert [*tmp_path.glob("events/events.*")]
    with pytest.raises(ConfigError, match="TensorBoard writes to no folder with bytes in its name"):
        TensorBoardLogger(place).open(RunInfo())
