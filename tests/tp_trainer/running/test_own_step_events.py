"""The events of steps that loops of one's own make themselves."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tp_testing import run_ranks
from tp_trainer import Callback, Trainer

from tests.reference_training import squared_error

X = torch.arange(20.0).reshape(20, 1) / 20


def loader(n=20):
    return DataLoader(TensorDataset(X[:n], 2 * X[:n]), batch_size=4, shuffle=True)


class Told(Callback):
    """Writes down what it is told, in short."""

    def __init__(self):
        self.words, self.norms = [], []

    def on_fit_start(self, run):
        self.words.append("start")

    def on_backward_end(self, run):
        self.words.append("b")

    def on_optimizer_step(self, run, grad_norm):
        self.words.append("o")
        self.norms.append(float(grad_norm))

    def on_step_end(self, run):
        self.words.append(f"s{run.step}")

    def on_fit_end(self, run):
        self.words.append("end")


def _told_of_own_steps(backend="auto", devices="cpu"):
    """A loop with two optimizers, one of which steps by itself and one by update(), in every second batch."""
    torch.manual_seed(1)
    told = Told()
    first, second = nn.Linear(1, 1), nn.Linear(1, 1)
    with Trainer(seed=0, devices=devices, backend=backend, progress=False) as trainer:
        first, second, batches = trainer.prepare(first, second, loader())
        for _ in range(2):  # passes before the loop are not its own, and change nothing in it
            trainer.backward(first(torch.ones(1)).sum())
        opt_1 = torch.optim.SGD(first.parameters(), lr=0.1)
        opt_2 = torch.optim.SGD(second.parameters(), lr=0.1)
        state = {"first": first, "second": second, "opt_1": opt_1, "opt_2": opt_2}
        with trainer.loop(batches, state=state, callbacks=[told]) as loop:
            for number, batch in enumerate(loop):
                opt_1.zero_grad()
                trainer.backward(trainer.run(squared_error, first, batch))
                expected = [float(trainer.clip_grad_norm(first, float("inf")))]
                opt_1.step()
                if number % 2:
                    opt_2.zero_grad()
                    trainer.backward(trainer.run(squared_error, second, batch))
                    expected.append(float(trainer.clip_grad_norm(second, float("inf"))))
                    trainer.update(second, opt_2, clip_norm=expected[-1] / 2)
                assert told.norms[-len(expected) :] == pytest.approx(expected)
        opt_1.step()  # the loop is over
        trainer.backward(trainer.run(squared_error, first, batch))
    return told.words, told.norms


def test_a_loop_of_ones_own_tells_of_its_backward_passes_and_steps():
    words, norms = _told_of_own_steps()
    one, two = ["b", "o"], ["b", "o", "b", "o"]
    assert words == ["start", *one, "s1", *two, "s2", *one, "s3", *two, "s4", *one, "s5", "end"]
    assert len(norms) == 7


@pytest.mark.parametrize("backend", ["tuple", "dp-gather"])
def test_the_norms_of_own_steps_are_those_of_one_device(backend):
    words, norms = _told_of_own_steps(backend, ["cpu", "cpu"])
    expected = _told_of_own_steps()
    assert (words, norms) == (expected[0], pytest.approx(expected[1], rel=1e-4))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["ddp", "fsdp"])
def test_the_norms_of_own_steps_are_those_of_one_device_on_two_ranks(backend):
    expected = _told_of_own_steps()
    for words, norms in run_ranks(partial(_told_of_own_steps, backend), 2):
        assert (words, norms) == (expected[0], pytest.approx(expected[1], rel=1e-4))


def test_a_step_with_a_closure_is_no_event_of_a_step():
    told = Told()
    model = nn.Linear(1, 1)
    with Trainer(seed=0, devices="cpu", progress=False) as trainer:
        model, batches = trainer.prepare(model, loader(4))
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
        with trainer.loop(batches, state={"model": model, "opt": optimizer}, callbacks=[told]) as loop:
            for batch in loop:

                def closure(batch=batch):
                    optimizer.zero_grad()
                    loss = trainer.run(squared_error, model, batch)
                    trainer.backward(loss)
                    return loss

                optimizer.step(closure)
    assert told.words[1:3] == ["b", "b"]
    assert "o" not in told.words
