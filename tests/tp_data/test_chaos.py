"""A program that is killed anywhere continues on other ranks and workers: the same samples in each step."""

import json
import signal
import subprocess
import sys
import time

import pytest

PROGRAM = """
import json, os, pathlib, sys
from tp_core.internal import write_atomically
from tp_data import Loader, Shuffle, Stream

folder, ranks, workers = pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
sources = {"a": str(folder / "a.jsonl"), "b": str(folder / "b.jsonl.gz")}
stream = Stream(sources, mixture={"a": 0.6, "b": 0.4}, until="all", shuffle=Shuffle(blocks=5, buffer=40))
loader = Loader(stream, 7, workers=workers)
own = [loader.for_rank(rank, ranks) for rank in range(ranks)]
state = folder / "state.json"
if state.exists():
    for one in own:
        one.load_state_dict(json.loads(state.read_text()))
for epoch in range(own[0].state_dict()["epoch"], 2):
    iterators = [iter(one) for one in own]
    while (parts := [next(one, None) for one in iterators])[0] is not None:
        ids = [i for one, part in zip(own, parts) for i in part["id"][: one.share.samples]]
        at = own[0].state_dict()
        with (folder / "log").open("a") as log:
            log.write(json.dumps([epoch, at["batch"], ids]) + "\\n")
        text = json.dumps(at)
        write_atomically(lambda part: part.write_text(text), state)
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


def run(folder, ranks, workers, kill_at=None):
    """Run the program; kill it when the log has so many lines."""
    command = [sys.executable, "-c", PROGRAM, str(folder), str(ranks), str(workers)]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as program:
        end = time.monotonic() + 120
        while program.poll() is None and time.monotonic() < end:
            log = folder / "log"
            if kill_at is not None and log.exists() and log.read_bytes().count(b"\n") >= kill_at:
                break
            time.sleep(0.002)
        program.send_signal(signal.SIGKILL)
        return program.stderr.read().decode()


@pytest.mark.slow
def test_a_run_that_is_killed_anywhere_loses_and_repeats_nothing(tmp_path):
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
        write_data(tmp_path / name)
    assert run(tmp_path / "whole", 1, 0) == ""
    whole = steps(tmp_path / "whole")
    for epoch in range(2):
        ids = [i for (e, _), step in sorted(whole.items()) if e == epoch for i in step]
        assert len(ids) == len(set(ids)) == 250
    for part, (ranks, workers) in enumerate([(2, 1), (3, 0)], start=1):
        run(tmp_path / "killed", ranks, workers, kill_at=part * 21)
    assert run(tmp_path / "killed", 6, 0) == ""
    assert (tmp_path / "killed" / "done").exists()
    assert steps(tmp_path / "killed") == whole
