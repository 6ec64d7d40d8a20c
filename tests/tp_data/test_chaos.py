"""Ranks that are killed anywhere continue on other ranks and workers: the same samples in each step."""

import json
import random
import signal
import subprocess
import sys
import time

import pytest

PROGRAM = """
import json, os, pathlib, sys
import torch.distributed as dist
from tp_core.files import write_atomically
from tp_data import Loader, Shuffle, Stream

folder, workers, store = pathlib.Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
rank, size = int(sys.argv[4]), int(sys.argv[5])
if size > 1:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
sources = {"a": str(folder / "a.jsonl"), "b": str(folder / "b.jsonl.gz")}
stream = Stream(sources, mixture={"a": 0.6, "b": 0.4}, until="all", shuffle=Shuffle(blocks=5, buffer=40))
loader = Loader(stream, 7, workers=workers)
state = folder / "state.json"
if state.exists():
    loader.load_state_dict(json.loads(state.read_text()))
for epoch in range(loader.state_dict()["epoch"], 2):
    for batch in loader:
        ids = batch["id"][: loader.share.samples]
        parts = [ids]
        if size > 1:  # as a step: every rank waits for the others
            parts = [None] * size
            dist.all_gather_object(parts, ids)
        at = loader.state_dict()
        if rank == 0:
            with (folder / "log").open("a") as log:
                log.write(json.dumps([epoch, at["batch"], sum(parts, [])]) + "\\n")
            text = json.dumps(at)
            write_atomically(lambda part: part.write_text(text), state)
if size > 1:
    dist.barrier()
if rank == 0:
    (folder / "done").touch()
"""


def write_data(folder):
    import gzip

    for name, start, count, opener in (("a.jsonl", 0, 150, open), ("b.jsonl.gz", 1000, 100, gzip.open)):
        with opener(folder / name, "wt") as file:
            file.writelines(json.dumps({"id": f"i{i}"}) + "\n" for i in range(start, start + count))


def steps(folder):
    """Return the ids by (epoch, batch), after a check that a step which was taken again had the same."""
    found = {}
    for line in (folder / "log").read_text().splitlines():
        try:
            epoch, batch, ids = json.loads(line)
        except ValueError:  # the kill came in the middle of the line
            continue
        assert found.setdefault((epoch, batch), ids) == ids
    return found


def lines_in(folder):
    log = folder / "log"
    return log.read_bytes().count(b"\n") if log.exists() else 0


def run(folder, ranks, workers, *, more=None, victim=0):
    """Run the program on ranks; kill one of them when the log has so many more lines, and then the others."""
    store = folder / f"store-{time.monotonic_ns()}"
    command = [sys.executable, "-c", PROGRAM, str(folder), str(workers), str(store)]
    stop_at = None if more is None else lines_in(folder) + more
    programs = [
        subprocess.Popen([*command, str(rank), str(ranks)], stderr=subprocess.PIPE) for rank in range(ranks)
    ]
    try:
        end = time.monotonic() + 150
        while time.monotonic() < end and any(program.poll() is None for program in programs):
            if stop_at is not None and lines_in(folder) >= stop_at:
                programs[victim % ranks].send_signal(signal.SIGKILL)
                break
            time.sleep(0.002)
    finally:
        for program in programs:
            program.kill()
        errors = [program.communicate()[1].decode() for program in programs]
    return errors


def killed_is_whole(folder, turns):
    """Check that a run in turns, (ranks, workers, lines until the kill, which rank), has the steps of one."""
    for name in ("whole", "killed"):
        (folder / name).mkdir()
        write_data(folder / name)
    assert run(folder / "whole", 1, 0) == [""]
    whole = steps(folder / "whole")
    for epoch in range(2):
        ids = [i for (e, _), step in sorted(whole.items()) if e == epoch for i in step]
        assert len(ids) == len(set(ids)) == 250
    for ranks, workers, more, victim in turns:
        run(folder / "killed", ranks, workers, more=more, victim=victim)
    run(folder / "killed", 1, 0)
    assert (folder / "killed" / "done").exists()
    assert steps(folder / "killed") == whole


@pytest.mark.slow
def test_a_run_that_is_killed_anywhere_loses_and_repeats_nothing(tmp_path):
    killed_is_whole(tmp_path, [(2, 1, 21, 1)])


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(3))
def test_many_kills_over_ranks_and_workers_lose_and_repeat_nothing(seed, tmp_path):
    choose = random.Random(seed)
    turns = [
        (choose.choice([1, 2, 3, 4, 6]), choose.choice([0, 1, 3]), choose.randint(1, 9), choose.randint(0, 5))
        for _ in range(10)
    ]
    killed_is_whole(tmp_path, turns)
