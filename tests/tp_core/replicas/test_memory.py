"""What a call of the replicas was given is freed when it is dropped, without the garbage collector."""

import weakref

import pytest
import torch
from torch import nn
from tp_core.replicas import Replicas

COPIES = pytest.mark.parametrize("force_copies", [False, True, "flat"], ids=["shared", "copied", "flat"])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))

    def forward(self, batch):
        return {"y": self.layers(batch["x"][0]), "again": batch["x"]}


def call(replica, part):
    return replica(part)


def train(replicas, parts):
    outputs = replicas.run(call, parts)
    sum(y["y"].sum() for y in outputs).backward()


def evaluate(replicas, parts):
    with torch.no_grad():
        replicas.run(call, parts)


def fail_in(number):
    def run(replicas, parts):
        def fail(replica, part):
            y = replica(part)
            if number in {part["number"], "all"}:
                raise ZeroDivisionError
            return y

        try:
            replicas.run(fail, parts)
        except ZeroDivisionError as caught:
            error = caught
        del error  # held for a while, as a user's variable does

    return run


WAYS = {
    "training": train,
    "evaluation": evaluate,
    "an error in the caller's part": fail_in(0),
    "an error in a thread": fail_in(1),
    "errors everywhere": fail_in("all"),
}


@COPIES
@pytest.mark.parametrize("way", WAYS)
def test_a_call_leaves_nothing_to_the_collector(memory, way, force_copies):
    replicas = Replicas(Net(), ["cpu"] * 3, force_copies=force_copies)

    def once():
        parts = [{"x": [torch.randn(4, 4)], "number": i} for i in range(3)]
        WAYS[way](replicas, parts)

    assert memory.cycles_per_call(once, warm_up=30) == 0


@COPIES
@pytest.mark.parametrize("way", WAYS)
def test_a_batch_is_freed_before_the_next_one_is_made(memory, way, force_copies):
    replicas = Replicas(Net(), ["cpu"] * 3, force_copies=force_copies)
    live = memory.LiveBytes()
    with memory.without_collector():
        for _ in range(30):
            WAYS[way](replicas, [{"x": [live.tensor(4, 4)], "number": i} for i in range(3)])
            assert live.now == 0


def test_an_interrupted_call_frees_what_it_was_given(memory):
    replicas = Replicas(Net(), ["cpu"] * 3)
    live = memory.LiveBytes()

    def interrupt(replica, part):
        raise KeyboardInterrupt

    with memory.without_collector():
        for _ in range(3):
            with pytest.raises(KeyboardInterrupt):
                replicas.run(interrupt, [{"x": live.tensor(2)} for _ in range(3)])
        assert live.now == 0


def test_an_error_that_is_kept_holds_no_cycle(memory):
    class Part:
        pass

    def fail(replica, part):
        raise ZeroDivisionError

    kept = []
    with memory.without_collector():
        parts = [Part() for _ in range(3)]
        living = [weakref.ref(p) for p in parts]
        try:
            Replicas(nn.Linear(2, 2), ["cpu"] * 3).run(fail, parts)
        except ZeroDivisionError as error:
            kept.append(error)
        del parts
        kept.clear()
        assert [ref() for ref in living] == [None] * 3
