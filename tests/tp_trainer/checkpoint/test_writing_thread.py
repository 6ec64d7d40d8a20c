"""After an error of the run, a thread that writes with other ranks holds nobody up."""

import logging
import threading

import pytest
import torch
from tp_core.tensors import TensorSlice
from tp_testing import run_ranks
from tp_trainer import Checkpoints, Trainer
from tp_trainer._checkpoint import _checkpointer  # its waits and its thread are no part of a run's surface


class Heard(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def half(rank):
    return {"weight": TensorSlice((4,), [((2 * rank,), torch.arange(2.0))])}


def leave_alone(folder):
    """Rank 0 begins to write, and fails; rank 1 is in a collective of a step that rank 0 never makes."""
    _checkpointer._GRACE_S = 2.0  # a run waits longer
    heard = Heard()
    logging.getLogger("tp_trainer").addHandler(heard)
    with Trainer(backend="ddp", devices="cpu", progress=False) as trainer:
        checkpointer = _checkpointer.Checkpointer(Checkpoints(folder, background=True), trainer.session)
        checkpointer.open()
        checkpointer.save(1, half(trainer.rank), {}, {}, {"metrics": {}})  # the group of the threads is made
        checkpointer._join()
        if trainer.rank == 0:
            # As after a save that rank 1 has not come to.
            monkey = trainer.session
            monkey.gather_objects = lambda value, **_: [value, value]
            monkey.broadcast = lambda value, **_: value
            checkpointer.save(2, half(0), {}, {}, {"metrics": {}})
            checkpointer.close()
            del monkey.gather_objects, monkey.broadcast
        trainer.session.barrier()
    return heard.lines


@pytest.mark.slow
def test_a_run_that_failed_does_not_wait_for_ever_for_ranks_that_wait_for_it(tmp_path):
    lines, _ = run_ranks(leave_alone, 2, str(tmp_path))
    assert [line for line in lines if "was not finished" in line] == [
        "the last checkpoint was not finished: for 2 s no rank has written any more of it"
    ]
    assert (tmp_path / "step-0000000001").is_dir(), "the one before is whole"


def test_a_thread_that_was_given_up_touches_nothing_of_the_next_run(tmp_path, monkeypatch):
    begun, may_go_on = threading.Event(), threading.Event()
    write = _checkpointer.write_whole

    def late(*args):
        begun.set()
        assert may_go_on.wait(800)
        return write(*args)

    monkeypatch.setattr(_checkpointer, "write_whole", late)
    settings = Checkpoints(tmp_path, background=True)
    with Trainer(backend="single", devices="cpu", progress=False) as trainer:
        first, second = (_checkpointer.Writer(settings, trainer.session) for _ in range(2))
        first.open()
        values = _checkpointer.Values(1, {}, [{}], {"metrics": {}})
        own = first.begin(1, together=False)
        thread = threading.Thread(
            target=first.write, args=(own, values, {"x": torch.ones(1)}), kwargs={"together": False}
        )
        thread.start()
        assert begun.wait(800)
        first.give_up()
        first.close()
        second.open()
        next_one = second.begin(1, together=False)
        own.mkdir()  # the sweep of the next run has deleted it; now the thread's writing succeeds
        may_go_on.set()
        thread.join(800)
        assert not thread.is_alive()
        second.close()
    assert first.last is None
    assert first.failure is None
    assert [path.name for path in tmp_path.glob("*step*")] == [next_one.name]
