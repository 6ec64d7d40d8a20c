"""A batch is freed when its output is dropped, without the garbage collector."""

import pytest
import torch
from torch import nn
from tp_dp_gather import DataParallel


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, batch, scale=1.0):
        return {"y": self.layer(batch["x"][0]) * scale, "seen": [batch["x"]]}


def whole(wrapper, live):
    wrapper({"x": [live.tensor(7, 4)]}, scale=2.0)["y"].sum().backward()


def in_parts(wrapper, live):
    outputs = [y["y"] for y in wrapper({"x": [live.tensor(7, 4)]})]
    wrapper.apply_loss(nn.CrossEntropyLoss(torch.ones(3)), outputs, torch.zeros(7).long()).backward()


def refused(wrapper, live):
    with pytest.raises(ValueError, match="same number of rows"):
        wrapper({"x": [live.tensor(7, 4), live.tensor(2, 4)]})


@pytest.mark.parametrize("use", [whole, in_parts, refused])
@pytest.mark.parametrize("count", [1, 2])
def test_a_batch_is_freed_before_the_next_one_is_made(memory, use, count):
    wrapper = DataParallel(Net(), ["cpu"] * count, gather_to_one_device=use is not in_parts)
    live = memory.LiveBytes()

    def once():
        use(wrapper, live)
        assert live.now == 0

    for _ in range(30):
        once()
    assert memory.cycles_per_call(once) == 0
