"""``tp run``: from files to a file, and on after an interruption."""

import json
import re
import signal
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from tests.tp_runner.registered import app_of

app = app_of("run")

MODULE = """
import os, time
from tp_runner import OrderedRunner, UnorderedRunner

class Lengths(OrderedRunner):
    @staticmethod
    def producer_work(device, cfg, item):
        return {"length": len(item["text"])}

class Slow(UnorderedRunner):
    @staticmethod
    def producer_work(device, cfg, item):
        while item["n"] >= 100 and os.path.exists("hold"):
            time.sleep(0.01)
        return item["n"] * 2

def upper(line):
    return line.upper()

def size(path):
    return os.path.getsize(path)

def fussy(line):
    if line == "b":
        raise ValueError("no b")
    return line

def odd(line):
    return object
"""


def module_in(folder):
    return "work_" + re.sub(r"\W", "_", folder.name)  # each test's own


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / f"{module_in(tmp_path)}.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def call(folder, name, *arguments):
    done = CliRunner().invoke(
        app,
        [
            f"{module_in(folder)}:{name}",
            *("--output", "out.jsonl", "--devices", "2", "--no-progress"),
            *arguments,
        ],
        catch_exceptions=True,
    )
    rows = []
    if (folder / "out.jsonl").exists():
        rows = [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]
    for row in rows:
        assert re.fullmatch("[0-9a-f]{16}", row.pop("input"))
    return done, rows


@pytest.mark.slow
def test_json_lines_of_several_files_become_json_lines(folder):
    for name, texts in {"a": ["x", "yy"], "b": ["zzz"]}.items():
        lines = "\n".join(json.dumps({"text": text}) for text in texts)
        (folder / f"{name}.jsonl").write_text(lines)
    done, rows = call(folder, "Lengths", "--input", "*.jsonl")
    assert done.exit_code == 0, done.output
    assert "0 done before, 3 now, 0 of them failed" in done.output
    assert rows == [
        {"source": "a.jsonl", "line": 1, "result": {"length": 1}},
        {"source": "a.jsonl", "line": 2, "result": {"length": 2}},
        {"source": "b.jsonl", "line": 1, "result": {"length": 3}},
    ]
    done, rows = call(folder, "Lengths", "--input", "a.jsonl", "b.jsonl")
    assert "3 done before, 0 now" in done.output
    assert len(rows) == 3


def test_lines_of_text_and_directories_of_files_are_read_too(folder):
    (folder / "lines.txt").write_text("a\n\nb\n")
    _, rows = call(folder, "upper", "--input", "lines.txt")
    assert [(row["line"], row["result"]) for row in rows] == [(1, "A"), (3, "B")]
    (folder / "out.jsonl").unlink()
    (folder / "files").mkdir()
    (folder / "files" / "one.bin").write_bytes(b"123")
    (folder / "files" / "two.bin").write_bytes(b"12345")
    done, rows = call(folder, "size", "--input", "files")
    assert done.exit_code == 0, done.exception
    assert [row["result"] for row in rows] == [3, 5]


def test_errors_end_the_run_or_stand_in_their_place(folder):
    (folder / "lines.txt").write_text("a\nb\nc\n")
    done, rows = call(folder, "fussy", "--input", "lines.txt")
    assert re.match(r"lines.txt, line 2: the work on item 1 .* raised .*no b", str(done.exception))
    assert str(done.exception).endswith("\n--keep-going writes errors in place of results, and continues")
    assert done.output.splitlines() == ["0 done before, 1 now, 0 of them failed: out.jsonl"]
    assert [row["result"] for row in rows] == ["a"]
    done, rows = call(folder, "fussy", "--input", "lines.txt", "--keep-going")
    assert "1 done before, 2 now, 1 of them failed" in done.output
    assert [row["line"] for row in rows] == [1, 2, 3]
    error = rows[1]["error"]
    assert (error["type"], error["message"]) == ("ValueError", "no b")
    assert "in fussy" in error["traceback"]


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("missing", ["--input", "lines.txt"], "no runner '.*:missing'"),
        ("upper", ["--input", "nothing*"], "no file, directory or pattern 'nothing\\*'"),
        ("upper", ["--input", "lines.txt", "--retry-delay-s", "1"], "give --max-retries too"),
        ("upper", ["--input", "lines.txt", "--format", "xml"], "--format must be one of auto"),
        ("upper", ["--input", "lines.txt", "--format", "jsonl"], "line 1 of lines.txt is not JSON"),
        (
            "odd",
            ["--input", "lines.txt"],
            "cannot be written as JSON: type is not a JSON value.*--keep-going",
        ),
        ("time", ["--input", "lines.txt"], "neither a runner class nor a function"),
    ],
)
def test_what_is_wrong_is_said(folder, name, arguments, message):
    (folder / "lines.txt").write_text("a\n")
    done, _ = call(folder, name, *arguments)
    assert re.search(message, str(done.exception)), done.exception


def test_a_file_that_is_no_output_of_ours_is_left_alone(folder):
    (folder / "lines.txt").write_text("a\n")
    (folder / "out.jsonl").write_text("my diary\n")
    arguments = [f"{module_in(folder)}:upper", "--input", "lines.txt", "--output", "out.jsonl"]
    done = CliRunner().invoke(app, arguments)
    assert "was not written by this command" in str(done.exception)
    assert (folder / "out.jsonl").read_text() == "my diary\n"


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, marks=pytest.mark.nightly),
    ],
)
def test_an_interrupted_run_goes_on_without_loss_or_repetition(folder, wait_until, number):
    (folder / "in.jsonl").write_text("".join(f'{{"n": {n}}}\n' for n in range(300)))
    command = [
        sys.executable,
        "-m",
        "tp_core.cli",
        "run",
        f"{module_in(folder)}:Slow",
        *("--input", "in.jsonl", "--output", "out.jsonl", "--devices", "2", "--no-progress"),
    ]
    out = folder / "out.jsonl"
    (folder / "hold").touch()
    first = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    wait_until(lambda: out.exists() and out.stat().st_size > 1000, timeout_s=800)
    if number == signal.SIGKILL:  # once is enough: a refusal waits some seconds for the owner's end
        refused, _ = call(folder, "Slow", "--input", "in.jsonl")
        assert f"out.jsonl is in use: process {first.pid} on host" in str(refused.exception)
    first.send_signal(number)
    assert first.wait(800) != 0
    (folder / "hold").unlink()
    with out.open("ab") as file:
        file.write(b'{"source": "in.jsonl", "li')  # as if it had been cut off in a write
    done, rows = call(folder, "Slow", "--input", "in.jsonl")
    assert done.exit_code == 0, done.output
    assert not re.search(r"^0 done before", done.output)
    assert [(row["line"], row["result"]) for row in rows] == [(n + 1, 2 * n) for n in range(300)]


def test_items_that_failed_are_tried_again_and_are_the_exit_status(folder):
    (folder / "lines.txt").write_text("a\nb\nc\n")
    done, _ = call(folder, "fussy", "--input", "lines.txt", "--keep-going")
    assert done.exit_code == 1
    module = folder / f"{module_in(folder)}.py"
    module.write_text(MODULE + "\n\ndef fussy_no_more(line):\n    return line\n")
    sys.modules.pop(module_in(folder), None)
    done, rows = call(folder, "fussy_no_more", "--input", "lines.txt", "--keep-going")
    assert done.exit_code == 0, done.output
    assert "2 done before, 1 now (1 had failed before), 0 of them failed" in done.output
    assert sorted((row["line"], row["result"]) for row in rows) == [(1, "a"), (2, "b"), (3, "c")]


def test_the_same_input_by_another_path_is_the_same(folder):
    (folder / "lines.txt").write_text("a\nb\n")
    call(folder, "upper", "--input", "lines.txt")
    for name in ("./lines.txt", str(folder / "lines.txt"), f"../{folder.name}/lines.txt"):
        done, rows = call(folder, "upper", "--input", name)
        assert "2 done before, 0 now" in done.output
        assert len(rows) == 2


def test_standard_input_goes_to_standard_output(folder, capfd):
    streams = ("--input", "-", "--output", "-")
    done = CliRunner().invoke(
        app, [f"{module_in(folder)}:upper", *streams, "--devices", "1", "--no-progress"], input="a\nb\n"
    )
    assert done.exit_code == 0, done.stderr
    # The descriptor itself, which what users print does not reach.
    rows = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert [(row["source"], row["line"], row["result"]) for row in rows] == [("-", 1, "A"), ("-", 2, "B")]
    assert not (folder / "-").exists()
