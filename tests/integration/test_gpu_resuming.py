"""A run with dropout goes on as if it had not ended, whichever number its accelerators have by then."""

import logging

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from tp_core import LaunchEnvironment
from tp_trainer import Trainer

from tests.accelerator import GPU, SECOND, needs_two

pytestmark = [pytest.mark.gpu, needs_two]

WIDTH, LENGTH = 8, 4


class Block(nn.Module):
    """Attention and a gate with dropout: (batch, length, width) -> the same."""

    def __init__(self):
        super().__init__()
        self.mixing = nn.Linear(WIDTH, 3 * WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x):
        parts = self.mixing(x).unflatten(-1, (3, 2, WIDTH // 2)).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.dropout(attended.transpose(1, 2).flatten(2))
        return x + self.down(self.dropout(self.up(x).relu()))


def error(model, batch):
    x, y = batch["x"], batch["y"]
    return {"loss": (model(x) - y).square().mean(), "weight": y.numel()}


def train(devices, backend, options, folder, epochs):
    """Train until that epoch, from the last state in the folder; return the weights, and the warnings."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Block(), Block(), nn.Linear(WIDTH, 1))
    if backend == "shard":
        import tp_shard

        device = torch.device(devices[LaunchEnvironment.read().rank])
        torch.accelerator.set_device_index(device)
        tp_shard.distributed.init_process_group()
        plan = {}
        for i in (1, 2):
            plan |= {f"{i}.up": tp_shard.Column(), f"{i}.down": tp_shard.Row()}
        model = tp_shard.parallelize(model, plan)
    draw = torch.Generator().manual_seed(3)
    rows = [
        {"x": torch.randn(LENGTH, WIDTH, generator=draw), "y": torch.randn(LENGTH, 1, generator=draw)}
        for _ in range(16)
    ]
    warned = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warned.append(record.getMessage())
    logging.getLogger("tp_trainer").addHandler(handler)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    options = {backend: options} if options else {}
    try:
        with Trainer(backend=backend, devices=devices, seed=5, progress=False, options=options) as trainer:
            trainer.fit(
                model,
                optimizer,
                DataLoader(rows, batch_size=4, shuffle=True),
                step=error,
                epochs=epochs,
                checkpoint=folder,
                resume="auto",
            )
            weights = {name: value.cpu() for name, value in trainer.session.model_state(model).items()}
    finally:
        logging.getLogger("tp_trainer").removeHandler(handler)
        if backend == "shard":
            tp_shard.distributed.destroy_process_group()
    return weights, warned


@pytest.mark.parametrize(
    ("backend", "before", "then"),
    [
        ("single", [GPU], [SECOND]),
        ("tuple", [GPU, SECOND], [SECOND, GPU]),
        ("tuple", [GPU, GPU], [SECOND, SECOND]),
        ("tuple", [GPU, "cpu"], [SECOND, "cpu"]),
        ("dp-gather", [GPU, SECOND], [SECOND, GPU]),
    ],
)
def test_one_process_on_other_devices_goes_on_as_before(backend, before, then, tmp_path):
    whole = train(before, backend, {}, tmp_path / "whole", 2)
    train(before, backend, {}, tmp_path / "run", 1)
    resumed = train(then, backend, {}, tmp_path / "run", 2)
    torch.testing.assert_close(resumed[0], whole[0], rtol=0.0, atol=0.0)
    assert resumed[1] == []


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("backend", "options"),
    [
        ("ddp", {}),
        ("fsdp", {"units": Block}),
        ("pipeline", {}),
        ("shard", {}),
        *[
            ("context", {"attention": name, "sequence": {"x": 0, "y": 0}})
            for name in ("all-gather", "ring", "ulysses")
        ],
    ],
    ids=lambda value: value if isinstance(value, str) else value.get("attention", ""),
)
def test_ranks_that_swapped_their_devices_go_on_as_before(pair, backend, options, tmp_path):
    whole = pair.run(train, [GPU, SECOND], backend, options, tmp_path / "whole", 2)
    pair.run(train, [GPU, SECOND], backend, options, tmp_path / "run", 1)
    resumed = pair.run(train, [SECOND, GPU], backend, options, tmp_path / "run", 2)
    for (weights, warned), (expected, _) in zip(resumed, whole, strict=True):
        torch.testing.assert_close(weights, expected, rtol=0.0, atol=0.0)
        assert warned == []
