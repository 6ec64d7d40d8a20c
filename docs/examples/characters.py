"""Train a transformer on the characters of Python's standard library, on whatever is here.

    python docs/examples/characters.py
    tp launch -n 2 docs/examples/characters.py
    python docs/examples/characters.py --devices cpu,cpu --backend dp-gather
    tp launch -n 2 docs/examples/characters.py --split

The losses are the same on one device, on several and with the layers split over ranks. Interrupt it
(Ctrl-C, SIGTERM) and start it again: it goes on after the step at which it was.
"""

import argparse
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from tp_trainer import Checkpoints, Limits, SchedulerOptions, Trainer

LENGTH, HEADS, HEAD_DIM = 64, 4, 16


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:  # (batch, time, dim)
        # As many heads as are here: a rank that holds a part of the layer has some of them.
        q, k, v = (
            part.unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    def __init__(self, characters: int, layers: int = 2) -> None:
        super().__init__()
        dim = HEADS * HEAD_DIM
        self.characters, self.places = nn.Embedding(characters, dim), nn.Embedding(LENGTH, dim)
        self.blocks = nn.Sequential(*(Block(dim) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, characters)

    def forward(self, x: Tensor) -> Tensor:  # (batch, time) -> (batch, time, characters)
        x = self.characters(x) + self.places(torch.arange(x.size(1), device=x.device))
        return self.head(self.norm(self.blocks(x)))


def read_text(limit: int = 400_000) -> str:
    """Return the beginning of the standard library's own modules."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return "".join(file.read_text(encoding="utf-8") for file in files)[:limit]


def step(model: nn.Module, batch: tuple[Tensor]) -> Tensor:
    (window,) = batch  # (batch, LENGTH + 1)
    return F.cross_entropy(model(window[:, :-1]).transpose(1, 2), window[:, 1:])


@torch.no_grad()
def write(model: nn.Module, start: Tensor, count: int) -> Tensor:
    """Go on after ``start``, always with the most likely character."""
    for _ in range(count):
        scores = model(start[None, -LENGTH:])
        start = torch.cat([start, scores[0, -1].argmax()[None]])
    return start


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--steps", type=int, help="steps of an epoch; all of the text by default")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--devices", default="auto")
    parser.add_argument("--split", action="store_true", help="split the layers over the ranks (tp-shard)")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for checkpoints and weights")
    args = parser.parse_args(arguments)

    text = read_text()
    alphabet = sorted(set(text))
    number_of = {character: number for number, character in enumerate(alphabet)}
    numbers = torch.tensor([number_of[character] for character in text])
    windows = numbers.unfold(0, LENGTH + 1, LENGTH)  # each begins with the last one's last character
    held_out = len(windows) // 20

    with Trainer(backend=args.backend, devices=args.devices, seed=0, accumulate=2) as trainer:
        torch.manual_seed(0)
        model = Transformer(len(alphabet))
        if args.split:
            import tp_shard as ts

            ts.distributed.init_process_group()
            plan = {
                "blocks.*.qkv": ts.Column(heads=HEADS, holds="qkv"),
                "blocks.*.out": ts.Row(heads=HEADS),
                "blocks.*.up": ts.Column(),
                "blocks.*.down": ts.Row(),
            }
            model = ts.parallelize(model, plan)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        train = DataLoader(TensorDataset(windows[:-held_out]), batch_size=16, shuffle=True, drop_last=True)
        steps = args.steps or len(train)
        history = trainer.fit(
            model,
            optimizer,
            train,
            step=step,
            epochs=args.epochs,
            limits=Limits(steps_per_epoch=steps),
            validation=DataLoader(TensorDataset(windows[-held_out:][:99]), batch_size=32),
            scheduler=SchedulerOptions(
                torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, args.epochs * -(-steps // 2)),
                every="step",
            ),
            clip_norm=1.0,
            checkpoint=Checkpoints(args.out / "checkpoints", every_steps=10, best="val_loss"),
            resume="auto",
        )
        trainer.export(model, args.out / "characters.safetensors")
        start = numbers[:LENGTH].to(trainer.device)
        written = write(model.eval(), start, 80).tolist()  # on every rank: a split model needs all of them
        if trainer.is_main:
            print("".join(alphabet[number] for number in written))
            losses = " ".join(f"{record.train['loss']:.6f}/{record.val['loss']:.6f}" for record in history)
            print(f"backend={trainer.selection.chosen.name} losses={losses}", flush=True)


if __name__ == "__main__":
    main()
