"""``tp run``: kinds of input and output, and input that is another one at the next run."""

import csv
import errno
import gzip
import json
import os

import pytest
from PIL import Image
from tp_core.errors import ConfigError, StateError

# private: a full disk, and a table that only the next run would write, cannot be had by the command
from tp_runner._command._journal import Journal
from tp_runner._command._pictures import check_unique_picture
from tp_runner._command._records import Record, find_inputs, read_records
from tp_runner._command._tables import write_table
from typer.testing import CliRunner

from tests.tp_runner.registered import app_of

app = app_of("run")

MODULE = """
from tp_runner import OrderedRunner

def total(row):
    return {"name": row["name"], "total": int(row["a"]) + int(row["b"])}

def upper(line):
    return line.upper()

def half(number):
    return float("nan") if number == 2 else number / 2

def darker(picture):
    assert picture.mode == "RGB"
    return picture.point(lambda value: value // 2)

class Sizes(OrderedRunner):
    @staticmethod
    def producer_work(device, cfg, pictures):
        return [picture.size for picture in pictures]
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    module = f"files_{abs(hash(tmp_path))}"  # each test's own
    (tmp_path / f"{module}.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def call(name, *arguments, exit_code=0):
        always = ["--devices", "1", "--no-progress"]
        done = CliRunner().invoke(app, [f"{module}:{name}", *arguments, *always])
        assert done.exit_code == exit_code, (done.output, done.exception)
        return done.output

    return call


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_table_of_text_becomes_another(run, tmp_path):
    (tmp_path / "in.csv").write_text('name,a,b\n"x, y",1,2\nz,3,4\n')
    run("total", "--input", "in.csv", "--output", "out.csv")
    with (tmp_path / "out.csv").open(newline="") as file:
        assert list(csv.DictReader(file)) == [
            {"source": "in.csv", "line": "1", "name": "x, y", "total": "3"},
            {"source": "in.csv", "line": "2", "name": "z", "total": "7"},
        ]
    assert "2 done before, 0 now" in run("total", "--input", "in.csv", "--output", "out.csv")


def test_parquet_is_read_and_written(run, tmp_path):
    parquet, pyarrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    table = pyarrow.table({"name": ["x", "y"], "a": [1, 2], "b": [10, 20]})
    parquet.write_table(table, tmp_path / "in.parquet")
    run("total", "--input", "in.parquet", "--output", "out.parquet")
    rows = parquet.read_table(tmp_path / "out.parquet").to_pylist()
    assert [(row["line"], row["name"], row["total"]) for row in rows] == [(1, "x", 11), (2, "y", 22)]


def test_compressed_lines_are_read(run, tmp_path):
    with gzip.open(tmp_path / "in.txt.gz", "wt") as file:
        file.write("a\nb\n")
    run("upper", "--input", "in.txt.gz", "--output", "out.jsonl")
    assert [row["result"] for row in rows_of(tmp_path / "out.jsonl")] == ["A", "B"]


@pytest.mark.slow
def test_workers_decode_pictures_and_encode_them(run, tmp_path):
    (tmp_path / "in" / "more").mkdir(parents=True)
    Image.new("L", (2, 3), 100).save(tmp_path / "in" / "a.png")
    Image.new("RGB", (4, 5), (200, 0, 0)).save(tmp_path / "in" / "more" / "a.bmp")
    (tmp_path / "in" / "notes.txt").write_text("no picture")
    run("darker", "--input", "in", "--format", "images", "--output", "out")
    with Image.open(tmp_path / "out" / "in" / "a.png") as picture:
        assert picture.getpixel((0, 0)) == (50, 50, 50)
    with Image.open(tmp_path / "out" / "in" / "more" / "a.bmp.png") as picture:
        assert picture.getpixel((0, 0)) == (100, 0, 0)
    again = run("darker", "--input", "in", "--format", "images", "--output", "out")
    assert "2 done before, 0 now" in again
    run("Sizes", "--input", "in", "--format", "images", "--output", "sizes.jsonl", "--batch", "8")
    assert [row["result"] for row in rows_of(tmp_path / "sizes.jsonl")] == [[2, 3], [4, 5]]


def test_pictures_that_would_be_saved_to_one_file_are_refused(run, tmp_path):
    (tmp_path / "in").mkdir()
    for name in ("x.jpg", "x.jpg.png"):
        Image.new("RGB", (1, 1), (200, 0, 0)).save(tmp_path / "in" / name)
    module = next(tmp_path.glob("files_*.py")).stem
    always = ["--format", "images", "--output", "out", "--input"]

    def require_refused(name, text=None):
        arguments = [f"{module}:darker", "--devices", "1", "--no-progress", *always, name]
        done = CliRunner().invoke(app, arguments, input=text)
        assert isinstance(done.exception, ConfigError), (done.output, done.exception)
        assert "in/x.jpg and in/x.jpg.png would both be saved as out/in/x.jpg.png" in str(done.exception)

    require_refused("in")
    assert not list((tmp_path / "out").rglob("*.png"))
    run("darker", *always, "in/x.jpg")
    kept = (tmp_path / "out" / "in" / "x.jpg.png").read_bytes()
    require_refused("in/x.jpg.png")  # the other is of an earlier run
    require_refused("-", "in/x.jpg.png\n")
    assert (tmp_path / "out" / "in" / "x.jpg.png").read_bytes() == kept
    taken = {}
    check_unique_picture("a/y.png", tmp_path, taken)
    check_unique_picture("./a/y.png", tmp_path, taken)
    with pytest.raises(ConfigError, match=r"a/y.png and \.\./a/y.png would both"):
        check_unique_picture("../a/y.png", tmp_path, taken)


def test_replaced_input_is_done_again_and_nothing_else(run, tmp_path):
    path = tmp_path / "lines.txt"
    path.write_text("a\nb\nc\n")
    run("upper", "--input", "lines.txt", "--output", "out.jsonl")
    path.write_text("a\nB2\nc\nd\n")
    output = run("upper", "--input", "lines.txt", "--output", "out.jsonl")
    assert "3 done before, 2 now (1 had been others before), 0 of them failed" in output
    rows = sorted((row["line"], row["result"]) for row in rows_of(tmp_path / "out.jsonl"))
    assert rows == [(1, "A"), (2, "B2"), (3, "C"), (4, "D")]
    assert "4 done before, 0 now" in run("upper", "--input", "lines.txt", "--output", "out.jsonl")


def test_a_result_that_is_not_json_is_a_failure_of_its_item(run, tmp_path):
    (tmp_path / "in.jsonl").write_text("1\n2\n3\n")
    run("half", "--input", "in.jsonl", "--output", "out.jsonl", "--keep-going", exit_code=1)
    one, two, three = rows_of(tmp_path / "out.jsonl")
    assert (one["result"], three["result"]) == (0.5, 1.5)
    assert "return finite numbers" in two["error"]["message"]


def test_a_summary_and_a_timeline_are_there_at_the_end(run, tmp_path):
    (tmp_path / "lines.txt").write_text("a\nb\n")
    arguments = ["--input", "lines.txt", "--output", "out.jsonl", "--timeline", "trace.json"]
    module = next(tmp_path.glob("files_*.py")).stem
    done = CliRunner().invoke(app, [f"{module}:upper", *arguments, "--devices", "1"])
    assert "2 results in" in done.output
    assert "1 worker over" in done.output
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


@pytest.mark.parametrize(
    ("output", "message"),
    [("out.xml", r"must end in .jsonl, .csv or .parquet"), ("pictures", r"give --format images")],
)
def test_an_output_of_no_known_kind_is_refused(tmp_path, monkeypatch, output, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.txt").write_text("a\n")
    done = CliRunner().invoke(app, ["json:dumps", "--input", "in.txt", "--output", output])
    assert isinstance(done.exception, ConfigError)
    assert message.replace("\\", "") in str(done.exception)


def test_files_of_a_missing_extra_say_which(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.parquet", None)
    (tmp_path / "in.parquet").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"pip install 'tp-runner\[files\]'"):
        find_inputs([str(tmp_path / "in.parquet")], "auto", outputs=[tmp_path / "out"])


def test_an_input_that_the_output_would_replace_is_refused(tmp_path):
    table = tmp_path / "table.csv"
    table.write_text("a\n1\n")
    with pytest.raises(ConfigError, match=r"table.csv is the output too"):
        find_inputs([str(table)], "auto", outputs=[table])


def test_each_file_is_found_once_and_neither_outputs_nor_hidden_ones(tmp_path):
    (tmp_path / "out").mkdir()
    for name in ("a.txt", "b.txt", "out.csv", ".out.csv.jsonl", ".hidden.txt", "out/a.txt.png"):
        (tmp_path / name).write_text("x\n")
    inputs = [str(tmp_path / "b.txt"), str(tmp_path), f"{tmp_path}/../{tmp_path.name}/*.txt"]
    outputs = [tmp_path / name for name in ("out.csv", ".out.csv.jsonl", "out")]
    found = [source.path.name for source in find_inputs(inputs, "auto", outputs=outputs)]
    assert found == ["b.txt", "a.txt"]


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("in.parquet", b"PAR1 and no more", "cannot be read as parquet: Arrow"),
        ("in.txt", b"\xff\xfe", r"line 1 of .*in.txt is not UTF-8: it has b'\\xff\\xfe' after 0 characters"),
        ("in.txt.gz", gzip.compress(b"a\n" * 99, mtime=0)[:-9], "cannot be read as lines: EOFError"),
        ("in.csv", b"a,b\n1,2\n4,5,6\n", r"row 2 of .*in.csv has more values.*\['6'\]"),
    ],
    ids=["parquet", "not-text", "cut-off", "long-row"],
)
def test_files_that_cannot_be_read_are_named(tmp_path, name, data, message):
    (tmp_path / name).write_bytes(data)

    def first_error():
        records = read_records(find_inputs([str(tmp_path / name)], "auto", outputs=[]))
        raise next(record.error for record in records if record.error is not None)

    with pytest.raises(ConfigError, match=message):
        first_error()


def test_a_table_has_the_columns_of_all_results(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    lines = [{"error": {"type": "E", "message": "m"}}, {"result": {"x": 1}}, {"result": {"x": 2, "y": "z"}}]
    journal, output = tmp_path / "journal", tmp_path / "out.parquet"
    entries = [{"source": "s", "line": i, **line} for i, line in enumerate(lines)]
    journal.write_text("".join(f"{json.dumps(entry)}\n" for entry in entries))
    write_table(journal, output)
    assert parquet.read_table(output).to_pydict() == {
        "source": ["s"] * 3,
        "line": [0, 1, 2],
        "error": ["E: m", None, None],
        "x": [None, 1, 2],
        "y": [None, None, "z"],
    }
    journal.write_text(journal.read_text() + json.dumps({"source": "s", "line": 3, "result": {"x": "?"}}))
    with pytest.raises(StateError, match=r"do not fit into the columns of a table: .*they are all in"):
        write_table(journal, output)
    journal.write_text("")
    for name in ("none.parquet", "none.csv"):
        write_table(journal, tmp_path / name)
        assert (tmp_path / name).exists()


def test_a_full_disk_is_told(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    out = tmp_path / "out.jsonl"
    with Journal(out) as file, monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(StateError, match=r"out.jsonl cannot be written: .*No space left"):
            file.write(Record("lines.txt", 1, "0", "a"), 1, keep_going=False)


def test_lines_that_cannot_be_read_have_errors_in_their_places(run, tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'1\n{"no"\n4\n"\xff"\n3\n')
    run("half", "--input", "in.jsonl", "--output", "out.jsonl", "--keep-going", exit_code=1)
    rows = rows_of(tmp_path / "out.jsonl")
    assert [row.get("result") for row in rows] == [0.5, None, 2.0, None, 1.5]
    assert rows[1]["error"]["message"].startswith("line 2 of in.jsonl is not JSON")
    assert (
        rows[3]["error"]["message"] == "line 4 of in.jsonl is not UTF-8: it has b'\\xff' after 1 characters"
    )
    path.write_bytes(b"1\n6\n4\n8\n3\n")  # they are tried again
    run("half", "--input", "in.jsonl", "--output", "out.jsonl", "--keep-going")
    assert sorted(row["result"] for row in rows_of(tmp_path / "out.jsonl")) == [0.5, 1.5, 2.0, 3.0, 4.0]


def test_tables_have_numbers_that_json_has_not(run, tmp_path):
    (tmp_path / "in.jsonl").write_text("1\n2\n3\n")
    run("half", "--input", "in.jsonl", "--output", "out.csv")
    with (tmp_path / "out.csv").open(newline="") as file:
        assert [row["result"] for row in csv.DictReader(file)] == ["0.5", "nan", "1.5"]
