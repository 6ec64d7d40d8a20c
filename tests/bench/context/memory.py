"""Peak of activations on split sequences: python -m tests.bench.context.memory

A decoder of two layers and 128 features, with a head of 1,000 tokens, in float32. Measured is the most that
torch's allocator for the CPU has given out during a step, beyond what there was before, in the rank that has
most; beside one process with whole sequences.
"""

import argparse
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from tp_context import attention, positions
from tp_testing import run_ranks
from tp_trainer import Trainer

from tests.bench._results import Results

WIDTH, HEADS, LAYERS, VOCABULARY = 128, 4, 2, 1000
WAYS = ("all-gather", "ulysses", "ring")


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.mixing, self.joining = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        parts = self.mixing(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.joining(attention(*parts, is_causal=True).transpose(1, 2).flatten(2))
        y: Tensor = x + self.wide(self.norms[1](x))
        return y


class Decoder(nn.Module):
    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(tokens, WIDTH)
        self.layers = nn.Sequential(*(Layer() for _ in range(LAYERS)))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(positions(tokens.size(1)))
        logits: Tensor = self.head(self.layers(x))
        return logits


def step(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    loss = F.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())
    return {"loss": loss, "weight": torch.tensor(batch["labels"].numel())}


def peak(tokens: int, way: str) -> int:
    """Return the most bytes of activations in this rank; ``way`` is "single" for whole sequences."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    ids = torch.randint(VOCABULARY, (1, tokens))
    batch = {"tokens": ids, "labels": ids.roll(-1, 1)}
    backend, options = ("single", None) if way == "single" else ("context", {"context": {"attention": way}})
    with Trainer(backend=backend, devices="cpu", progress=False, seed=0, options=options) as trainer:
        model = Decoder(tokens)
        model, _ = trainer.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range(3):  # the check is in the first, and the gradients of DDP move in the second
            with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
                loss = trainer.run(step, model, batch)["loss"]
                trainer.backward(loss)
            del loss
        # Private to torch: its public tables leave out what no operator has allocated, such as buckets.
        events = profiled.profiler.kineto_results.events()  # type: ignore[union-attr]
        found = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
        return max(accumulate(nbytes for _, nbytes in found))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 16384])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--ways", nargs="+", default=WAYS)
    arguments = parser.parse_args()
    is_part = arguments != parser.parse_args([])
    with Results("context-memory", is_part=is_part) as results:
        for tokens in arguments.tokens:
            (whole,) = run_ranks(peak, 1, tokens, "single")
            results.add(f"{tokens} tokens, one process", whole / 2**20, "MiB")
            for ranks in arguments.ranks:
                for way in arguments.ways:
                    found = max(run_ranks(peak, ranks, tokens, way))
                    figure = f"{tokens} tokens, {ranks} ranks, {way}: ratio"
                    results.add(figure, found / whole, "of one process", note=f"{found / 2**20:.1f} MiB")


if __name__ == "__main__":
    from tests.bench.context import memory  # so that ranks import it by its name

    memory.main()
