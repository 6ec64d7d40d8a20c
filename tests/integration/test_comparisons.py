"""What the page of comparisons says: each row names what shows it; what a dead worker does is tried."""

import itertools
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BESIDE = (ROOT / "docs" / "beside.md").read_text()
LIMITS = "docs/limits.md"
RUNNER, SHARD, TRAINER, LAUNCH = (
    "tests/tp_runner",
    "tests/tp_shard",
    "tests/tp_trainer",
    "tests/tp_launch",
)
KIT = "packages/tp-testing/src/tp_testing/_training_conformance.py"
SAME = f"{KIT}::test_it_leads_where_one_device_leads"
# The beginning of a row, and the test, the figures or the page that hold what it says of tp.
SHOWN = {
    "one script for one device": [SAME, "tests/integration/test_training_conformance.py"],
    "several devices of one": [
        "tests/tp_tuple/test_equality.py::test_twenty_steps_are_those_of_the_module_by_itself"
    ],
    "models sharded over": [
        f"{TRAINER}/backends/test_fsdp_building.py::test_ranks_build_the_model_of_one_device",
        SAME,
    ],
    "layers split over": [
        f"{SHARD}/search/test_families.py::test_a_translated_plan_trains_like_the_whole_model"
    ],
    "backends of others": [
        "tests/integration/test_published_plugins.py::test_a_new_plugin_is_published_found_and_right"
    ],
    "means over tokens": ["tests/integration/test_token_means.py::test_tokens_count_alike_on_every_backend"],
    "resume within": [
        f"{TRAINER}/checkpoint/test_resume.py::test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit"
    ],
    "resume on another": [f"{KIT}::test_a_checkpoint_goes_on_on_one_device"],
    "a damaged checkpoint": [
        f"{TRAINER}/checkpoint/test_checkpoints.py::test_a_damaged_one_is_named_and_the_one_before_it_is_used"
    ],
    "a step of a tiny": ["docs/benchmarks/trainer-one-process.json"],
    "with loggers, callbacks": ["docs/benchmarks/trainer-equipped.json"],
    "TPU, DeepSpeed": [LIMITS],
    "used by many": [LIMITS],
    "how many times faster": ["docs/benchmarks/runner.json"],
    "the same, with Pool given": ["docs/benchmarks/runner.json"],
    "arrays of 1 MB": ["docs/benchmarks/runner.json"],
    "items read ahead": ["docs/benchmarks/runner.json"],
    "a worker is killed": [
        f"{RUNNER}/scheduling/test_deaths.py::test_a_death_is_noticed_at_once_and_names_signal_and_items",
        f"{RUNNER}/scheduling/test_deaths.py::test_with_restart_no_item_is_lost_or_doubled",
        "tests/integration/test_comparisons.py::test_a_dead_worker_does_to_others_what_the_table_says",
    ],
    "stages of one pipeline": [
        f"{RUNNER}/test_pipeline.py::test_stages_give_none_one_or_several_results_in_order"
    ],
    "many machines": ["tests/tp_ray/test_cluster.py::test_a_pipeline_is_the_same_code_on_a_cluster"],
    "a tiny column layer": ["docs/benchmarks/shard-layers.json"],
    "an MLP 1024": ["docs/benchmarks/shard-layers.json"],
    "a finished model": [
        f"{SHARD}/search/test_families.py::test_a_translated_plan_trains_like_the_whole_model"
    ],
    "margins over a million": ["docs/benchmarks/shard-margins-1000000.json"],
    "context parallelism": ["tests/integration/context_families.py"],
    "pipeline parallelism": ["tests/integration/pipeline_families.py"],
    "figures of GPUs": [LIMITS],
    "one host, several": [
        "tests/integration/launch/test_two_machines.py::test_an_elastic_job_goes_on_without_a_host_that_is_cut_off"
    ],
    "the failure that came": [
        f"{LAUNCH}/hosts/test_hosts.py::test_every_host_tells_the_cause_that_one_of_them_had"
    ],
    "a host that falls": [
        f"{LAUNCH}/hosts/test_heartbeat.py::test_a_silent_host_is_lost_once_and_all_others_hear_of_it"
    ],
    "jobs in the background": [f"{LAUNCH}/jobs/test_jobs.py::test_a_detached_job_is_followed_to_its_end"],
    "comes with torch": ["tests/tp_core/launch/test_environment.py::test_torchruns_variables_are_read"],
}


def rows():
    """Return the rows of the tables that compare, without their heads."""
    lines = [line for line in BESIDE.splitlines() if line.startswith("| ")]
    heads = re.findall(r"^(\|.*)\n\|---", BESIDE, re.MULTILINE)
    return [line for line in lines if line not in heads]


def test_every_row_says_what_shows_it():
    without = [row for row in rows() if sum(row.startswith(f"| {start}") for start in SHOWN) != 1]
    assert without == []
    assert len(rows()) == len(SHOWN)


def test_what_shows_a_row_is_there():
    for place in itertools.chain(*SHOWN.values()):
        path, _, name = place.partition("::")
        text = (ROOT / path).read_text()
        assert not name or re.search(rf"^ *def {name}\(", text, re.MULTILINE), place


DEATHS = {
    "multiprocessing": """
import multiprocessing, os, time

def work(number):
    if number == 3:
        os.kill(os.getpid(), 9)
    return number

if __name__ == "__main__":
    pool = multiprocessing.get_context("spawn").Pool(2)
    result = pool.map_async(work, range(8), chunksize=1)
    others = [pool.apply_async(work, (number,)) for number in range(3)]
    assert [other.get(600) for other in others] == [0, 1, 2]  # the pool works on, and the call is not told
    try:
        result.get(5)
    except multiprocessing.TimeoutError:
        print("waits")
    pool.terminate()
""",
    "joblib": """
import os
from joblib import Parallel, delayed

def work(number):
    if number == 3:
        os.kill(os.getpid(), 9)
    return number

if __name__ == "__main__":
    try:
        Parallel(2)(delayed(work)(number) for number in range(8))
    except Exception:
        print("the call fails")
""",
    "mpire": """
import os
from mpire import WorkerPool

def work(number):
    if number == 3:
        os.kill(os.getpid(), 9)
    return number

if __name__ == "__main__":
    try:
        with WorkerPool(2, start_method="spawn") as pool:
            pool.map(work, range(8), chunk_size=1)
    except Exception:
        print("the call fails")
""",
}


@pytest.mark.slow
@pytest.mark.parametrize("library", [pytest.param(n, marks=pytest.mark.needs(n)) for n in DEATHS])
def test_a_dead_worker_does_to_others_what_the_table_says(library, tmp_path):
    (tmp_path / "script.py").write_text(DEATHS[library])
    command = [sys.executable, "script.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=800, check=False)
    (row,) = [row for row in rows() if row.startswith("| a worker is killed")]
    cells = dict(zip(["multiprocessing", "joblib", "mpire"], row.split(" | ")[2:5], strict=True))
    assert done.stdout.strip() == cells[library], done.stderr
