"""The page of a run: what is in it, that it needs nothing else, and what is said where there is no run."""

import json
import math
import os
import re
import sys
from itertools import product
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from tp_core.errors import ConfigError, StateError
from tp_trainer import Trainer, write_report
from tp_trainer._reports import charts  # private: the parts of a page
from tp_trainer._reports._figures import _MOST_POINTS, _thinned  # private: as above
from tp_trainer.loggers import JsonLinesLogger, RunInfo, read_run

from tests.reference_training import mean_square
from tests.run_tp import run


def leave_run(folder, *, steps=20, host="a host"):
    folder.mkdir()
    facts = {"hyperparameters": {"lr": 0.1}, "environment": {"host": host}, "versions": {"torch": "2"}}
    logger = JsonLinesLogger(folder)
    logger.open(RunInfo(selection="backend 'single' (auto)", **facts))
    for step in range(1, steps // 2 + 1):
        logger.log({"loss": 1 / step, "learning_rate": 0.1}, step=step, epoch=1)
    logger.event("checkpoint", {"path": "step-10"}, step=10, epoch=1)
    logger.event("interruption", {"signal": "SIGTERM"}, step=12, epoch=1)
    logger.close("interrupted")
    logger.open(RunInfo(resumed=True, step=10, selection="backend 'single' (auto)", **facts))
    for step in range(11, steps + 1):
        logger.log({"loss": math.nan if step == 15 else 1 / step}, step=step, epoch=2)
    logger.log({"val_loss": 0.5}, step=steps, epoch=2)
    logger.close("finished")
    return folder


def page_of(*runs):
    (page,) = write_report(runs)
    return page.read_text()


def test_a_page_tells_the_story_of_a_run(tmp_path):
    page = page_of(leave_run(tmp_path / "run"))
    for words in (
        "resumes from the checkpoint of step 10",
        "interruption: signal SIGTERM",
        "checkpoint: path step-10",
        "backend &#39;single&#39; (auto)",
        "a host",
        "restarts",
    ):
        assert words in page
    assert page.count("<svg") == 2  # the loss with its validation, and the learning rate


def test_a_page_needs_nothing_else_and_follows_the_readers_colors(tmp_path):
    page = page_of(leave_run(tmp_path / "run"))
    links = set(re.findall(r"https?://[^\s\"'<>]+", page))
    assert all(link.startswith("http://www.w3.org/") for link in links)  # names of XML, not places
    assert not re.search(r"<(script|link|img|iframe)\b|@import|url\((?!#)", page)
    assert "prefers-color-scheme: dark" in page
    figures = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    for figure in figures:
        ET.fromstring(figure)
        assert "var(--ink)" in figure
        assert "#0102" not in figure


@pytest.mark.slow
def test_a_trace_in_the_folder_of_a_run_is_a_picture_of_who_computed_what_when(tmp_path):
    folder = leave_run(tmp_path / "run")
    rows = [
        {"name": "thread_name", "ph": "M", "tid": rank, "args": {"name": f"rank {rank}"}} for rank in (0, 1)
    ]
    spans = [
        {"name": f"{kind} {part}", "ph": "X", "tid": rank, "ts": 100.0 * (time + rank), "dur": 90.0}
        | {"cat": f"stage {part}"}
        for time, (kind, part) in enumerate(product(("forward", "backward"), (6, 7)))
        for rank in (0, 1)
    ]
    trace = folder / "stages.trace.json"
    trace.write_text(json.dumps({"traceEvents": rows + spans}))
    page = page_of(folder)
    assert page.count("<svg") == 3
    assert all(f">{words}<" in page for words in ("stages: idle 27%", "rank 0", "rank 1", "forward", "7"))
    assert page.count("opacity: 0.7") == 4  # the second stage of each rank is paler
    trace.write_text("{}")
    with pytest.raises(StateError, match=r"stages.trace.json is not a trace of Chrome's format: .* move it"):
        page_of(folder)


def test_several_runs_are_on_one_page_under_names_of_their_own(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    runs = [leave_run(tmp_path / "a" / "run"), leave_run(tmp_path / "b" / "run")]
    page = page_of(*runs)
    assert page.count("<svg") == 2
    assert "a/run" in page
    assert "b/run" in page


def test_one_chart_has_one_value_for_each_step_where_a_callback_logs_the_same_name(tmp_path):
    logger = JsonLinesLogger(tmp_path)
    logger.open(RunInfo())
    for step in (4, 8):
        logger.log({"samples_per_s": 10.0 * step}, step=step, epoch=1)
    logger.log({"epoch_samples_per_s": 50.0}, step=8, epoch=1)
    logger.close("finished")
    (chart,) = charts([("run", read_run(tmp_path))])
    assert [(curve.steps, curve.values) for curve in chart.curves] == [([4, 8], [40.0, 80.0])]


def test_what_a_run_says_is_text_and_not_part_of_the_page(tmp_path):
    evil = "<script>alert(1)</script>"
    folder = leave_run(tmp_path / "run", host=evil)
    logger = JsonLinesLogger(folder)
    logger.open(RunInfo(resumed=True, step=20, environment={"host": evil}))
    logger.log({evil: 1.0}, step=21, epoch=2)
    logger.close("finished")
    assert "<script" not in page_of(folder)


@pytest.mark.slow
def test_a_name_with_dollars_is_no_formula(tmp_path):
    name, folder = "$\\frac{x$", tmp_path / "$\\frac{run$"
    folder.mkdir()
    logger = JsonLinesLogger(folder)
    logger.open(RunInfo())
    for step in (1, 2):
        logger.log({name: 1 / step, f"val_{name}": 2 / step}, step=step, epoch=1)
    logger.close("finished")
    assert name in page_of(folder, leave_run(tmp_path / "run"))
    assert write_report([folder], pictures=tmp_path / "pictures")[1:]


def test_a_run_whose_files_have_names_that_are_no_text_has_a_page(tmp_path):
    folder = leave_run(tmp_path / "run", host=os.fsdecode(b"r\xff"))
    assert r"r\udcff" in page_of(folder)


def test_a_curve_of_many_points_keeps_its_peaks():
    values = [1.0] * 100_000
    values[12_345], values[54_321] = 100.0, -100.0
    steps, kept = _thinned(range(100_000), values)
    assert len(steps) <= _MOST_POINTS + 2
    assert (kept[steps.index(12_345)], kept[steps.index(54_321)]) == (100.0, -100.0)
    assert steps == sorted(steps)


def test_the_loss_comes_first_and_validation_beside_training(tmp_path):
    found = charts([("run", read_run(leave_run(tmp_path / "run")))])
    assert [chart.name for chart in found] == ["loss", "learning_rate"]
    assert [curve.label for curve in found[0].curves] == ["training", "validation"]
    assert [word for _, word in found[0].marks] == ["interruption", "restart"]


@pytest.mark.slow
def test_pictures_are_written(tmp_path):
    page, *written = write_report([leave_run(tmp_path / "run")], pictures=tmp_path / "pictures")
    assert page == tmp_path / "run" / "report.html"
    assert [path.name for path in written] == ["loss.png", "learning_rate.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)


def test_a_run_that_was_killed_before_it_logged_anything_has_a_page(tmp_path):
    logger = JsonLinesLogger(tmp_path)
    logger.open(RunInfo())
    page = page_of(tmp_path)
    logger.close("failed")
    assert "running or killed" in page
    assert "No numbers were logged" in page


def test_without_matplotlib_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"pip install 'tp-trainer\[report\]'"):
        page_of(leave_run(tmp_path / "run"))


def test_checkpoints_alone_are_the_record_of_a_run(tmp_path):
    model = torch.nn.Linear(2, 1)
    loader = DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=4)
    with Trainer(devices="cpu", progress=False) as trainer:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        history = trainer.fit(
            model, optimizer, loader, step=mean_square, epochs=3, validation=loader, checkpoint=tmp_path
        )
    assert not (tmp_path / "log.jsonl").exists()
    found = read_run(tmp_path)
    assert found.series("loss") == ([2, 4, 6], history.to_dict()["loss"])
    assert found.series("val_loss")[1] == history.to_dict()["val_loss"]
    assert "val_loss" in page_of(tmp_path)


def test_no_run_is_refused():
    with pytest.raises(ConfigError, match="at least one run"):
        write_report([])


@pytest.mark.slow
def test_the_command_writes_the_page_and_says_where(tmp_path, capsys):
    folder = leave_run(tmp_path / "run")
    assert run(["report", str(folder), "--png", str(tmp_path / "png"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["page"] == str(folder / "report.html")
    assert str(tmp_path / "png" / "loss.png") in found["pictures"]
    assert all(Path(path).exists() for path in [found["page"], *found["pictures"]])
    assert run(["report", str(folder)]) == 0
    assert capsys.readouterr().out == f"{folder / 'report.html'}\n"
    assert run(["report", str(tmp_path / "no")]) == 1
    assert "has no log.jsonl" in capsys.readouterr().err
