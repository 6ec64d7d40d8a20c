"""What a step costs above one by hand, in calls of functions: times need an idle machine."""

import collections
import re
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from tp_testing import run_ranks
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


def _train(way, n_steps):
    pairs = [(torch.zeros(4), torch.zeros(1))] * 2 * n_steps
    with Trainer(backend="single", devices="cpu", progress=False) as trainer:
        if way == "fit":
            trainer.fit(*make(), DataLoader(pairs, batch_size=2), step=step, epochs=1)
            return
        model, optimizer, batches = trainer.prepare(*make(), DataLoader(pairs, batch_size=2))
        is_loop = way == "loop"
        state = {"model": model, "optimizer": optimizer}
        with trainer.loop(batches, state=state) if is_loop else nullcontext(batches) as taken:
            for batch in taken:
                optimizer.zero_grad()
                trainer.backward(step(model, batch))
                optimizer.step()


def _calls_of_tp(way, n_steps):
    calls = collections.Counter()

    def count(frame, event, argument):
        if event == "call" and frame.f_globals.get("__name__", "").startswith("tp_"):
            calls[frame.f_code.co_qualname] += 1

    sys.setprofile(count)
    try:
        _train(way, n_steps)
    finally:
        sys.setprofile(None)
    return calls


def test_each_step_on_one_device_calls_what_the_page_says():
    page = (Path(__file__).parents[3] / "ARCHITECTURE.md").read_text().split("## What a step calls")[1]
    rows = re.findall(r"^\| `(\S+)` \| (`.+?) \| .+ \|$", page, re.MULTILINE)
    for way in ("fit", "loop", "prepare"):
        _train(way, 2)  # which imports
        few, many = _calls_of_tp(way, 10), _calls_of_tp(way, 30)
        found = {name: (n - few[name]) / 20 for name, n in many.items() if n - few[name] >= 10}
        assert found == {name: 1 for name, ways in rows if f"`{way}`" in ways}, way
