"""A real notebook: how far a stream is stands in one output, and nothing is red."""

import json
import re

import pytest

from tests.notebooks import outputs_of

CELLS = {
    "bar": """
import tp_runner

def half(x):
    return x / 2

with tp_runner.map(half, range(100), n_workers=2, engine="thread") as results:
    total = sum(results)
""",
    "unknown length": "total = sum(tp_runner.map(half, iter(range(30)), n_workers=2, engine='thread'))",
    "left early": """
for result in tp_runner.map(half, range(100), n_workers=1, engine="inline"):
    print("first", result)
    break
""",
    "asynchronous": """
class Halves(tp_runner.OrderedRunner):
    producer_work = staticmethod(lambda device, cfg, x: x / 2)

with Halves(n_workers=1, engine="thread") as runner:
    found = [result async for result in runner.astream(range(7))]
""",
    "table": """
pipeline = tp_runner.Pipeline(n_workers=2, engine="thread").map(half, name="halves").map(abs, name="last")
with pipeline:
    total = sum(pipeline.stream(range(50)))
""",
    "nested": """
def outer(x):
    return list(tp_runner.map(half, range(x), n_workers=1, engine="thread"))

with tp_runner.map(outer, [1, 2], n_workers=1, start_method="fork", progress=False) as results:
    print(list(results))
""",
    "without streams": """
import sys

class HasWriteAlone:
    def write(self, text):
        return len(text)

found, streams = [], (sys.stdout, sys.stderr)
for stream in (None, HasWriteAlone()):
    sys.stdout = sys.stderr = stream
    try:
        found += tp_runner.map(half, range(3), n_workers=1, engine="thread")
    finally:
        sys.stdout, sys.stderr = streams
print(found)
""",
    "off": "total = sum(tp_runner.map(half, range(100), n_workers=2, engine='thread', progress=False))",
    "error": "list(tp_runner.map(lambda x: 1 / x, [1, 0], n_workers=1, start_method='fork'))",
}


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """The outputs of the cells, by what they are about."""
    return outputs_of(CELLS, tmp_path_factory.mktemp("notebook"))


pytestmark = [
    pytest.mark.slow,
    # of jupyter's own packages
    pytest.mark.filterwarnings("default"),
]


def line_of(output):
    assert output["output_type"] == "display_data"
    assert "<progress" not in output["data"]["text/html"]  # the bar has gone
    return output["data"]["text/plain"]


@pytest.mark.parametrize(
    ("cell", "n_items", "n_workers"),
    [("bar", 100, 2), ("unknown length", 30, 2), ("asynchronous", 7, 1)],
)
def test_a_stream_is_one_output_with_one_line_in_the_end(outputs, cell, n_items, n_workers):
    (shown,) = outputs[cell]
    busy = " ".join([r"\d+%"] * n_workers)
    assert re.fullmatch(rf"{n_items} items, \d+\.\d/s, busy {busy}", line_of(shown))


def test_a_stream_that_is_left_says_how_far_it_was(outputs):
    printed, shown = outputs["left early"]
    assert printed["text"] == "first 0.0\n"
    assert line_of(shown).startswith("1 items, ")


def test_a_pipeline_shows_its_table(outputs):
    (shown,) = outputs["table"]
    lines = line_of(shown).splitlines()
    assert re.search(r"halves .* 2 cpu, shared .* 50 .* 50 .*/s", lines[3])
    assert re.search(r"last .* 2 cpu, shared .* 50 .* 50 .*/s", lines[4])


def test_workers_of_a_notebook_show_no_progress_of_their_own(outputs):
    (printed,) = outputs["nested"]
    assert printed["text"] == "[[0.0], [0.0, 0.5]]\n"


def test_a_stream_goes_on_where_no_output_can_be_shown(outputs):
    printed = outputs["without streams"][-1]  # the kernel itself flushes both streams before each output
    assert printed["text"] == "[0.0, 0.5, 1.0, 0.0, 0.5, 1.0]\n"


def test_nothing_is_shown_where_nothing_was_asked_for(outputs):
    assert not outputs["off"]


def test_the_error_of_a_worker_is_that_of_the_cell(outputs):
    shown, error = outputs["error"]
    assert line_of(shown).startswith("1 items, ")
    assert error["ename"] == "WorkerError"
    assert "ZeroDivisionError" in error["evalue"]


def test_nothing_warns(outputs):
    assert "Warning" not in json.dumps(outputs)
