"""A rank of the trainer fails: the last thing that the launcher prints says who and why."""

import pytest

from tests.launches import failure_block


@pytest.mark.slow
def test_a_rank_that_leaves_before_the_job_starts_is_named_at_once(tp):
    script = tp.script(
        """
        import os, sys
        if os.environ["RANK"] == "1":
            sys.exit(0)
        from tp_trainer import Trainer
        Trainer(devices="cpu", progress=False).session
        """
    )
    done = tp("launch", "-n", "2", script, timeout_s=800)
    assert done.returncode == 1
    block = failure_block(done.stderr)
    assert block.startswith("rank 1 left first, with exit code 0; then rank 0 failed: exit code 1")
    assert "cause   likely the end of rank 1:" in block
    assert "a call of all ranks (export, evaluate, reduce) under `if trainer.is_main`" in block
    assert "RankFailedError: rank 1 has ended, with status 0, before it came to the job's start" in block


@pytest.mark.slow
def test_ranks_with_different_samples_show_the_line_of_the_script_once_and_a_sentence(tp):
    script = tp.script(
        """
        import os
        from torch.nn import Linear
        from torch.utils.data import DataLoader, Subset
        from tp_trainer import Trainer
        mine = Subset(range(8), range(int(os.environ["RANK"]), 8, 2))
        Trainer(devices="cpu", progress=False).prepare(Linear(1, 1), DataLoader(mine))
        """
    )
    done = tp("launch", "-n", "2", script, timeout_s=800)
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == done.stderr.count(", line ") == 1
    assert "prepare(Linear(1, 1), DataLoader(mine))" in done.stderr
    for text in (done.stderr, failure_block(done.stderr)):
        assert "give every rank the whole dataset, in the same order" in text


@pytest.mark.slow
def test_a_rank_that_failed_ends_although_it_has_a_thread(tp):
    script = tp.script(
        """
        import os, threading, time
        from tp_trainer import Trainer
        trainer = Trainer(devices="cpu", progress=False)
        trainer.session.barrier()
        if trainer.rank == 1:
            threading.Thread(target=time.sleep, args=(10**6,), name="sleeper").start()
            raise ValueError("no such luck")
        trainer.session.barrier()
        """
    )
    done = tp("launch", "-n", "2", script, timeout_s=800)
    assert done.returncode == 1
    block = failure_block(done.stderr)
    assert block.startswith("rank 1 failed first: exit code 1")
    assert "ValueError: no such luck" in block
    assert "this rank has failed, and is ended although it has threads: sleeper" in done.stderr
