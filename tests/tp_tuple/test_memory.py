"""A batch is freed when its output is dropped, without the garbage collector."""

import pytest
import torch
from torch import nn
from tp_tuple import TupleParallel, default_collate


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, batch, scale=1.0):
        return self.layer(batch["x"][0]) * scale, [batch["x"]]


def positional(wrapper, live):
    ys, _ = wrapper(tuple({"x": [live.tensor(3, 4)]} for _ in wrapper.device_ids))
    sum(y.sum() for y in ys).backward()


def with_keywords(wrapper, live):
    parts = [{"x": [live.tensor(3, 4)]} for _ in wrapper.device_ids]
    wrapper(batch=tuple(parts), scale=(2.0,) * len(parts))


@pytest.mark.parametrize("use", [positional, with_keywords])
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("transfer_output", [False, True])
def test_a_batch_is_freed_before_the_next_one_is_made(memory, use, count, transfer_output):
    wrapper = TupleParallel(Net(), ["cpu"] * count, transfer_output)
    live = memory.LiveBytes()

    def once():
        use(wrapper, live)
        assert live.now == 0

    for _ in range(30):
        once()
    assert memory.cycles_per_call(once) == 0


def test_collating_leaves_nothing_to_the_collector(memory):
    collate = default_collate(2)
    items = [{"x": torch.ones(3), "y": [1, (2.0, "name")]} for _ in range(5)]
    assert memory.cycles_per_call(lambda: collate(items)) == 0
