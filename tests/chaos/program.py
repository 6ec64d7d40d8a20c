"""The program that chaos is brought upon: a small model with checkpoints, whose ranks kill themselves.

Its loaders have workers, which draw random numbers; `--still` leaves out what is drawn, for runs that change
their number of ranks, which draw otherwise. Each kill is noted in the folder before it happens: the file
``kills/<start>`` is of the rank that killed itself in that start, and has the signal.
"""

import argparse
import json
import os
import random
import signal
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from tp_trainer import Checkpoints, Trainer
from tp_trainer.callbacks import ExponentialMovingAverage, StochasticWeightAveraging

BATCHES = 12
AVERAGES = {"moving": (ExponentialMovingAverage, 0.9), "stochastic": (StochasticWeightAveraging, 1)}


class Doom:
    """Ends this process at a random moment of each start, as often as it was told to.

    Args:
        folder: That of the run.
        kills: How many starts end so.
        seed: Of the moments, ranks and signals.
        start: The number of this start.
        calls: How often the step is called for a batch: in stages for each micro-batch.
        everywhere: Whether moments of validations count, too, and a signal may ask the run to end.
    """

    def __init__(
        self, folder: Path, kills: int, seed: int, start: int, *, calls: int, everywhere: bool
    ) -> None:
        fate = random.Random(f"{seed}/{start}")
        rank = fate.randrange(int(os.environ.get("WORLD_SIZE", "1")))
        self._left = fate.randint(1, BATCHES * calls) if start < kills else -1
        self._note = folder / "kills" / str(start)
        self._is_mine = rank == int(os.environ.get("RANK", "0"))
        self._everywhere = everywhere
        self._signal = signal.SIGKILL
        if everywhere and fate.random() < 1 / 3:
            self._signal = signal.SIGTERM

    def step(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Any:
        if model.training or self._everywhere:
            self._left -= 1
            if self._left == 0 and self._is_mine:
                self._note.parent.mkdir(exist_ok=True)
                self._note.write_text(self._signal.name)
                os.kill(os.getpid(), self._signal)
        x, y = batch
        loss = (model(x) - y).square().mean()
        return loss if x.is_floating_point() else {"loss": loss, "weight": y.numel()}


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """Samples that are augmented at random, with torch's generator and Python's, unless they are still."""

    def __init__(self, *, still: bool) -> None:
        self._x = torch.randn(BATCHES * 8 - 3, 4, generator=torch.Generator().manual_seed(0)).double()
        self._still = still

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = self._x[index]
        if not self._still:
            x = x + 0.1 * torch.randn(4) + 0.1 * random.random()
        return x, x.sum(0, keepdim=True).sin()


class Sequences(Dataset[tuple[Tensor, Tensor]]):
    """Sequences of tokens, with a number for each."""

    def __init__(self) -> None:
        shape = BATCHES * 8 - 3, 13
        self._tokens = torch.randint(9, shape, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        tokens = self._tokens[index]
        return tokens, tokens.double().cumsum(0).sin()[:, None]


class AttentionBlock(nn.Module):
    """Mixes the tokens of a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.mixing = nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.mixing(x)[:, None].chunk(3, -1)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)[:, 0]
        return x + nn.functional.dropout(mixed, 0.2, self.training)


class Attending(nn.Module):
    """A model of sequences that a backend may split."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(9, 8), nn.Linear(8, 1)
        self.blocks = nn.ModuleList(AttentionBlock() for _ in range(layers - 1))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x).clone()


def make_model(tensor: int, layers: int, *, still: bool) -> Any:
    torch.manual_seed(1)
    dropout = nn.Dropout(0.0 if still else 0.2)
    more = [m for _ in range(layers - 2) for m in (nn.Linear(16, 16), nn.Tanh())]
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), dropout, *more, nn.Linear(16, 1)).double()
    if tensor == 1:
        return model
    import tp_shard as ts

    ts.distributed.init_process_group(tensor)
    return ts.parallelize(model, {"0": ts.Column(gather_output=True), "3": ts.Row()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kills", type=int, default=0, help="how many starts end by a kill")
    parser.add_argument("--seed", type=int, default=0, help="of the chaos")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--start", type=int, default=0, help="starts before the launcher's first")
    parser.add_argument("--tensor", type=int, default=1, help="ranks that hold each layer together")
    parser.add_argument("--layers", type=int, default=2, help="from which stages are made")
    parser.add_argument("--still", action="store_true", help="draw nothing at random")
    parser.add_argument("--frozen", action="store_true", help="train the last layer, and save it alone")
    parser.add_argument("--weights", default="", help="split sequences, and hold weights by this backend")
    parser.add_argument("--options", type=json.loads, default={}, help="of backends, as JSON")
    parser.add_argument("--average", choices=AVERAGES, help="keep an average of the weights")
    parser.add_argument("--calls", type=int, default=1, help="how often the step is called for a batch")
    parser.add_argument("--everywhere", action="store_true", help="end in validations, and by SIGTERM, too")
    parser.add_argument("--workers", type=int, default=2, help="of each loader")
    args = parser.parse_args()

    start = args.start + int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    doom = Doom(args.folder, args.kills, args.seed, start, calls=args.calls, everywhere=args.everywhere)
    data = Sequences() if args.weights else Noisy(still=args.still)
    options = {"shard": {"data": "fsdp"}} if args.tensor > 1 else {}
    model = make_model(args.tensor, args.layers, still=args.still)
    if args.weights:
        model = Attending(args.layers).double()
        options = {"context": {"context": 2, "weights": args.weights}}
    options |= args.options
    average = None
    if args.average:
        kind, argument = AVERAGES[args.average]
        average = kind(argument)
    rules: dict[str, Any] = {}
    if args.frozen:
        model[0].requires_grad_(False)
        rules = {"weights": "trainable", "background": True}
    with Trainer(seed=1, progress=False, devices="cpu", options=options) as trainer:
        optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
        trainer.fit(
            model,
            optimizer,
            DataLoader(data, batch_size=8, shuffle=True, num_workers=args.workers),
            step=doom.step,
            epochs=args.epochs,
            validation=DataLoader(
                data,
                batch_size=16,
                num_workers=min(args.workers, 1),
                persistent_workers=args.workers > 0,
            ),
            checkpoint=Checkpoints(args.folder / "run", every_steps=2, **rules),
            resume="auto",
            callbacks=[] if average is None else [average],
        )
        trainer.save_model(model, args.folder / "end.pt")
        with nullcontext() if average is None else average.in_place_of(model):
            trainer.save_model(model, args.folder / "average.pt")


if __name__ == "__main__":
    main()
