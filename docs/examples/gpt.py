"""Train a small GPT on the sources of Python's standard library, split over ranks by tensor parallelism.

    torchrun --nproc-per-node 2 docs/examples/gpt.py

The model is plain PyTorch. A plan says which layers are split; between them each rank has a part of
the sequence. It predicts bytes, so that there is nothing to download and no tokenizer. On one
process (``python docs/examples/gpt.py``) the same file trains the same model in one piece.
"""

import argparse
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import torch
import tp_shard as ts
from torch import Tensor, nn
from torch.nn import functional as F

PLAN = {
    "tokens": ts.Vocab(),
    "head": ts.Vocab(),
    "places": ts.Sequence(),
    "blocks.*.norm*": ts.Sequence(),
    "blocks.*.qkv": ts.Column(heads=8, kv_heads=2, holds="qkv"),
    "blocks.*.out": ts.Row(heads=8, kv_heads=2),
    "blocks.*.gate_up": ts.Column(sections=2),
    "blocks.*.down": ts.Row(),
    "norm": ts.Sequence(),
}


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, dim // 8 * (8 + 2 * 2))  # 8 query heads share 2 key heads
        self.out = nn.Linear(dim, dim)
        self.gate_up = nn.Linear(dim, 2 * 3 * dim, bias=False)
        self.down = nn.Linear(3 * dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # (batch, seq, dim)
        x = x + self.out(ts.nn.functional.parallel_attention(self.qkv(self.norm1(x)), 8, 2, causal=True))
        gate, up = self.gate_up(self.norm2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Gpt(nn.Module):
    def __init__(self, dim: int = 128, layers: int = 2, places: int = 128) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, dim), nn.Embedding(places, dim)
        self.blocks = nn.Sequential(*(Block(dim) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, 256, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.02)
        self.head.weight = self.tokens.weight  # tied

    def forward(self, tokens: Tensor) -> Tensor:  # (batch, seq) -> (batch, seq, local classes)
        x = self.tokens(tokens) + self.places(torch.arange(tokens.size(1)))
        return self.head(self.norm(self.blocks(x)))


def read_sources(limit: int) -> Tensor:
    """Return the first bytes of the standard library's own modules, the same on every rank."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"".join(file.read_bytes() for file in files)[:limit]
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def main(arguments: Sequence[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--out", type=Path, help="where to save the whole model's state")
    args = parser.parse_args(arguments)

    ts.distributed.init_process_group()
    torch.manual_seed(0)  # ranks of one group start alike and draw the same batches
    model = ts.parallelize(Gpt(), PLAN)
    first = ts.distributed.get_rank() == 0
    if first:
        print(ts.summary(model))
    text = read_sources(4_000_000)
    optimizer = torch.optim.AdamW(ts.parameter_groups(model, weight_decay=0.1), lr=3e-3)
    losses = []
    for step in range(args.steps):
        starts = torch.randint(len(text) - 129, (args.batch, 1))
        window = text[starts + torch.arange(129)]  # (batch, seq + 1)
        logits = model(window[:, :-1])
        loss = ts.nn.functional.parallel_cross_entropy(
            logits, window[:, 1:], num_classes=256, parallel=True, class_dim=-1, inplace=True
        )
        optimizer.zero_grad()
        loss.backward()
        ts.clip_grad_norm_(model, 1.0)
        optimizer.step()
        losses.append(loss.item())
        if first and (step % 20 == 0 or step == args.steps - 1):
            print(f"step {step:4d} loss {losses[-1]:.3f}", flush=True)
    if args.out is not None:
        state = ts.collect_state_dict(model, model.state_dict(), to="rank0")
        if first:
            torch.save(state, args.out)
    ts.distributed.destroy_process_group()
    return losses


if __name__ == "__main__":
    main()
