"""What a step of a custom loop costs above one by hand, in calls of functions: times need an idle machine."""

import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from tp_core.testing import run_ranks
from tp_trainer import Trainer

STEPS = 20


def make():
    model = nn.Linear(4, 1)
    return model, torch.optim.SGD(model.parameters(), lr=1e-3)


def step(model, batch):
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def calls_per_step(body):
    """Return how many functions of Python are called, or generators resumed, in a second run of ``body``."""
    body()
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        body()
    finally:
        sys.setprofile(None)
    return calls / STEPS


def _calls_of_loops():
    dist.init_process_group("gloo")
    batches = [(torch.randn(2, 4), torch.randn(2, 1)) for _ in range(STEPS)]
    trainer = Trainer(devices="cpu", progress=False)

    def loop(model, optimizer, loader, learn):
        for batch in loader:
            optimizer.zero_grad()
            learn(model, batch)
            optimizer.step()

    model, optimizer = make()
    by_hand = DistributedDataParallel(model), optimizer, batches
    prepared = trainer.prepare(*make(), batches, shard=False)
    return (
        calls_per_step(lambda: loop(*by_hand, lambda model, batch: step(model, batch).backward())),
        calls_per_step(lambda: loop(*prepared, lambda model, batch: trainer.backward(step(model, batch)))),
        calls_per_step(
            lambda: loop(*prepared, lambda model, batch: trainer.backward(trainer.run(step, model, batch)))
        ),
    )


@pytest.mark.slow
def test_a_step_of_a_custom_loop_on_two_ranks_has_few_calls_more_than_one_by_hand():
    for by_hand, with_backward, with_run in run_ranks(_calls_of_loops, 2):
        assert with_backward - by_hand < 15
        assert with_run - by_hand < 15
