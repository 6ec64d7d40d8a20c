"""Train a decoder in stages over several processes, with a loss over tokens.

    python stages.py
    tp launch -n 2 stages.py
    tp launch -n 4 stages.py --schedule ZBVZeroBubble --trace stages/stages.trace.json

The text is the standard library's sources, as bytes. Every layout has the loss of one process.
"""

import argparse
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader
from tp_core import LaunchEnvironment
from tp_trainer import Checkpoints, Trainer

TOKENS, WIDTH = 64, 64


class Decoder(nn.Module):
    def __init__(self, layers: int = 8) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, WIDTH), nn.Embedding(TOKENS, WIDTH)
        kind = {"nhead": 4, "dim_feedforward": 128, "dropout": 0.0, "batch_first": True, "norm_first": True}
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, **kind) for _ in range(layers))
        self.head = nn.Linear(WIDTH, 256, bias=False)
        self.head.weight = (
            self.tokens.weight
        )  # tied: the first and the last stage have it, and sum its gradients

    def forward(self, tokens: Tensor) -> Tensor:
        n = tokens.size(1)
        x = self.tokens(tokens) + self.places(torch.arange(n))
        mask = nn.Transformer.generate_square_subsequent_mask(n)
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return self.head(x)


def rows() -> list[Tensor]:
    """Return rows of tokens; short lines end in zeros, which do not count."""
    text = Path(sysconfig.get_path("stdlib"), "argparse.py").read_bytes().split(b"\n\n")
    return [torch.tensor(list(part[:TOKENS].ljust(TOKENS, b"\0"))) for part in text if part][:96]


def step(model: nn.Module, tokens: Tensor) -> dict[str, Tensor]:
    labels = F.pad(tokens[:, 1:], (0, 1))
    loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), ignore_index=0)
    return {"loss": loss, "weight": (labels != 0).sum()}


def main(arguments: Sequence[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schedule", default="1F1B")
    parser.add_argument("--trace", help="a file for ui.perfetto.dev")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("stages"))
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    model = Decoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    in_stages = LaunchEnvironment.read().world_size > 1
    chosen = {"schedule": options.schedule, "trace": options.trace}
    with Trainer(
        backend="pipeline" if in_stages else "single", options={"pipeline": chosen}, devices="cpu", seed=0
    ) as trainer:
        history = trainer.fit(
            model,
            optimizer,
            DataLoader(rows(), batch_size=16),
            step=step,
            epochs=options.epochs,
            clip_norm=1.0,
            checkpoint=Checkpoints(options.out),
            resume="auto",
            log="jsonl",
        )
        loss = history[-1].train["loss"]
        if trainer.is_main:
            print(f"{trainer.selection.chosen.name}: loss {loss:.4f}")
    return loss


if __name__ == "__main__":
    main()
