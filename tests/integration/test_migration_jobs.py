"""Six jobs, each with tp, Lightning and Accelerate: lines that are counted, and numbers that are the same."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cut_short import CUT
from tests.integration.test_migration import lines_of_code

ROOT = Path(__file__).parents[2]
JOBS = ROOT / "docs" / "examples" / "jobs"
PAGE = ROOT / "docs" / "jobs.md"
ROW = re.compile(r"^\| \[[^\]]+\]\(#job-(\w+)\) \| (\d+) \| (\d+) \| (\d+) \|$", re.MULTILINE)
SECTION = re.compile(r"^\(job-(\w+)\)=\n## .*?^```text\n(.*?)^```", re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"^\w+ -?\d+(?:\.\d+)?$", re.MULTILINE)
LIBRARIES = {  # what their programs import
    "tp": "tp_trainer,sklearn.metrics,transformers",
    "lightning": "pytorch_lightning,torchmetrics.classification,torchdata.stateful_dataloader,transformers",
    "accelerate": "accelerate,sklearn.metrics,transformers",
}
# The optimizer step that an interrupted run does not reach, in the second epoch and after a checkpoint in it.
STEPS = {"texts": 6, "pictures": 8, "gan": 10, "pairs": 6, "language": 6, "stream": 6}


def test_the_lines_are_counted():
    counted = {
        job: tuple(lines_of_code((JOBS / job / f"with_{library}.py").read_text()) for library in LIBRARIES)
        for job in STEPS
    }
    assert {job: tuple(map(int, lines)) for job, *lines in ROW.findall(PAGE.read_text())} == counted


def run_in_forks(modules, runs):
    """Run programs one after the other; return the status and the output of each."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", ROOT / "tests" / "cut_short.py", modules],
        input="".join(json.dumps(run) + "\n" for run in runs),
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=1700,  # for 18 programs, one after the other
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def parts_of(library, modules):
    """Yield jobs of a library: one of tp's is slow; those of others change with their releases alone."""
    needed = pytest.mark.needs(*(m.split(".")[0] for m in modules.split(",")))
    for jobs in (["texts"], ["gan"], ["pictures", "pairs", "language", "stream"]):
        # Of all jobs it has the most that is its own: two models, two optimizers, and its loop.
        part = pytest.mark.slow if (library, jobs) == ("tp", ["gan"]) else pytest.mark.nightly
        yield pytest.param(library, jobs, marks=(part, needed), id=f"{library}-{jobs[0]}")


@pytest.mark.takes(60)
@pytest.mark.parametrize(
    ("library", "jobs"), [part for of_one in LIBRARIES.items() for part in parts_of(*of_one)]
)
def test_the_jobs_of_a_library_come_to_the_numbers_of_the_page_whole_and_interrupted(library, jobs, tmp_path):
    runs = []
    for job in jobs:
        step = STEPS[job]
        for kind in ("whole", "parts"):
            shutil.copytree(JOBS / job, tmp_path / job / kind)
        program = f"with_{library}.py"
        runs.append((str(tmp_path / job / "whole"), program, None))
        runs.append((str(tmp_path / job / "parts"), program, step))
        runs.append((str(tmp_path / job / "parts"), program, None))
    done = run_in_forks(LIBRARIES[library], runs)
    expected = dict(SECTION.findall(PAGE.read_text()))
    assert expected.keys() == STEPS.keys()
    for number, job in enumerate(jobs):
        whole, cut, resumed = done[3 * number : 3 * number + 3]
        assert [run["status"] for run in (whole, cut, resumed)] == [0, CUT, 0], (whole, cut, resumed)
        for run in (whole, resumed):
            assert NUMBER.findall(run["printed"]) == expected[job].splitlines(), job


ADAPTERS = {
    "tp": "tp_trainer,transformers,peft",
    "trl": "trl,datasets,peft",
    "accelerate": "accelerate,transformers,peft",
}


def test_the_lines_of_the_job_with_adapters_are_counted():
    counted = [lines_of_code((JOBS / "adapters" / f"with_{library}.py").read_text()) for library in ADAPTERS]
    assert "| " + " | ".join(f"{lines} lines" for lines in counted) + " |" in PAGE.read_text()


@pytest.mark.nightly
@pytest.mark.parametrize("library", ["tp", pytest.param("trl", marks=pytest.mark.needs("trl")), "accelerate"])
def test_adapters_come_to_the_numbers_of_the_page_whole_and_interrupted(library, tmp_path):
    runs = []
    for kind, steps in {"whole": [None], "parts": [8, None]}.items():
        shutil.copytree(JOBS / "adapters", tmp_path / kind)
        runs += [(str(tmp_path / kind), f"with_{library}.py", step) for step in steps]
    whole, cut, resumed = run_in_forks(ADAPTERS[library], runs)
    assert [run["status"] for run in (whole, cut, resumed)] == [0, CUT, 0], (whole, cut, resumed)
    section = re.search(r"^\(adapters\)=\n.*?^```text\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    for run in (whole, resumed):
        assert NUMBER.findall(run["printed"]) == section[1].splitlines()
