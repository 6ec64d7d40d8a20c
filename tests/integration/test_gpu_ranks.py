"""Every kind of backend, on two accelerators, trains what one CPU trains."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader
from tp_core import LaunchEnvironment
from tp_trainer import Trainer

from tests.accelerator import GPU, SECOND, needs_two

pytestmark = [pytest.mark.gpu, needs_two]

VOCABULARY, TOKENS, WIDTH = 11, 8, 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.mixing, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        parts = self.mixing(x).unflatten(-1, (3, 2, WIDTH // 2)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(attended)
        return x + self.down(F.gelu(self.up(x)))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def rows(count=16):
    tokens = torch.randint(0, VOCABULARY, (count, TOKENS + 1), generator=torch.Generator().manual_seed(3))
    return [{"tokens": row[:-1], "labels": row[1:]} for row in tokens]


def cross_entropy(model, batch):
    loss = F.cross_entropy(model(batch["tokens"]).flatten(0, -2), batch["labels"].flatten())
    return {"loss": loss, "weight": batch["labels"].numel()}


def train(devices, backend, options):
    """Train, and return the weights on the CPU, and the loss at the end."""
    torch.manual_seed(1)
    model = Decoder()
    if backend == "shard":
        import tp_shard

        device = torch.device(devices[LaunchEnvironment.read().rank])
        torch.accelerator.set_device_index(device)
        tp_shard.distributed.init_process_group()
        plan = {}
        for block in ("layers.0", "layers.1"):
            plan |= {f"{block}.up": tp_shard.Column(), f"{block}.down": tp_shard.Row()}
        model = tp_shard.parallelize(model, plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(rows(), batch_size=4)
    options = {backend: options} if options else {}
    with Trainer(backend=backend, devices=devices, seed=5, progress=False, options=options) as trainer:
        trainer.fit(model, optimizer, loader, step=cross_entropy, epochs=2, clip_norm=1.0)
        loss = trainer.evaluate(model, loader, step=cross_entropy)
        weights = {name: value.cpu() for name, value in trainer.session.model_state(model).items()}
    return weights, loss


@pytest.fixture(scope="module")
def expected():
    return train("cpu", "single", {})


@pytest.mark.parametrize("backend", ["tuple", "dp-gather"])
def test_one_process_with_two_devices_equals_one_cpu(backend, expected):
    torch.testing.assert_close(train([GPU, SECOND], backend, {}), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("backend", "options"),
    [
        ("ddp", {}),
        ("fsdp", {"units": Block}),
        ("pipeline", {}),
        ("shard", {}),
        *[
            ("context", {"attention": name, "sequence": {"tokens": 1, "labels": 1}})
            for name in ("all-gather", "ring", "ulysses")
        ],
    ],
    ids=lambda value: value if isinstance(value, str) else value.get("attention", ""),
)
def test_two_ranks_with_a_device_each_equal_one_cpu(pair, backend, options, expected):
    for found in pair.run(train, [GPU, SECOND], backend, options):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
