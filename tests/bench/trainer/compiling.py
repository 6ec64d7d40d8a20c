"""What compiling costs and gains, by blocks and as a whole: python -m tests.bench.trainer.compiling

The first step and a later one of a transformer of 8 blocks, with torch's default compiler; then steps of
two more lengths, each the first of its length. Each way runs in a process without a cache on the disk.
"""

import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from typing import Literal

import torch
from torch import nn
from tp_trainer import Trainer

from tests.bench._results import Results

BLOCKS, WIDTH, BATCH, LENGTHS = 8, 128, 4, (64, 96, 80)
STEPS = 30
WAYS: dict[str, "bool | Literal['blocks']"] = {"not compiled": False, "whole": True, "blocks": "blocks"}


class Block(nn.TransformerEncoderLayer):
    """Has a forward pass of its own, as torch compiles none of its own layers by themselves."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]  # it needs no mask
        return super().forward(x)


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(100, WIDTH)
        self.blocks = nn.ModuleList(
            Block(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True) for _ in range(BLOCKS)
        )
        self.head = nn.Linear(WIDTH, 100)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def step(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def measured(way: str) -> dict[str, float]:
    """Return the seconds of the first steps, and of a later one, in a new process."""
    torch.set_num_threads(1)
    trainer = Trainer(devices="cpu", backend="single", compile=WAYS[way], progress=False)
    model = Network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer = trainer.prepare(model, optimizer)

    def seconds(length: int) -> float:
        tokens = torch.randint(100, (BATCH, length), generator=torch.Generator().manual_seed(0))
        began = time.perf_counter()
        optimizer.zero_grad()
        trainer.backward(trainer.run(step, model, tokens))
        optimizer.step()
        return time.perf_counter() - began

    found = {f"the first step of length {length}": seconds(length) for length in LENGTHS}
    found["a later step"] = statistics.median(seconds(LENGTHS[0]) for _ in range(STEPS))
    from torch._dynamo.utils import counters

    return found | {"graphs": float(counters["stats"]["unique_graphs"])}


def main() -> None:
    context = multiprocessing.get_context("spawn")
    with Results("trainer-compiling") as results:
        for way in WAYS:
            with tempfile.TemporaryDirectory() as cache:
                os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
                with context.Pool(1) as pool:
                    found = pool.apply(measured, (way,))
            for name, value in found.items():
                results.add(f"{way}: {name}", value, "" if name == "graphs" else "s")


if __name__ == "__main__":
    sys.exit(main())
