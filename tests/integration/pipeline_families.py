"""Tiny models, in stages on several ranks beside one device: each right, or refused by name.

    python -m tests.integration.pipeline_families                 # all models and schedules on 2 and 4 ranks
    python -m tests.integration.pipeline_families llama t5 --ranks 2 --schedules 1F1B

The table has the largest relative difference of losses and of weights after three steps: at most 1e-12 in
float64, 1e-6 in float32. Batches of eight rows are cut into micro-batches of one or two, in which other
numbers of labels count, or none.
"""

import argparse
import sys
import time
import warnings
from contextlib import nullcontext
from functools import partial
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader
from tp_core import LaunchEnvironment
from tp_core.errors import TpError
from tp_core.sessions import join_process_group
from tp_testing import RankPool
from tp_trainer import Trainer

from tests.integration import context_families as families

ROWS, LAYERS = 8, 8
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-6}
SCHEDULES = (
    "GPipe",
    "1F1B",
    "LoopedBFS",
    "Interleaved1F1B",
    "InterleavedZeroBubble",
    "ZBVZeroBubble",
    "DualPipeV",
)
DEPTHS = ("num_hidden_layers", "n_layer", "num_layers", "encoder_layers", "decoder_layers", "n_layers")
OWN = ("resnet", "encoder")
MODELS = ("bert", "gpt2", "llama", "qwen2_moe", "t5", "vit", *OWN)
MORE = {
    "qwen2_moe": (
        "Qwen2MoeForCausalLM",
        families.GROUPED
        | {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
        },
        "decoder",
    ),
}


class ResidualBlock(nn.Module):
    """torchvision's BasicBlock, with GroupNorm."""

    def __init__(self, channels, out, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, 1, bias=False)
        self.norm1 = nn.GroupNorm(2, out)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.norm2 = nn.GroupNorm(2, out)
        self.downsample = nn.Conv2d(channels, out, 1, stride, bias=False)

    def forward(self, x):
        return F.relu(self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))) + self.downsample(x))


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1)
        blocks = [ResidualBlock(8 if i < 3 else 12, 8 if i < 2 else 12, 1 + (i == 4)) for i in range(8)]
        self.layer1, self.layer2 = nn.Sequential(*blocks[:4]), nn.Sequential(*blocks[4:])
        self.fc = nn.Linear(12, 2)

    def forward(self, pixel_values, labels):
        x = self.layer2(self.layer1(F.relu(self.conv1(pixel_values))))
        return F.cross_entropy(self.fc(x.mean((2, 3))), labels)


class Encoder(nn.Module):
    """torch's own encoder under a mask of padding."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(families.VOCABULARY, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(16, families.VOCABULARY)

    def forward(self, input_ids, labels, attention_mask):
        x = self.encoder(self.embedding(input_ids), src_key_padding_mask=attention_mask == 0)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def make_model(name, dtype):
    if name in OWN:
        torch.manual_seed(0)
        return {"resnet": ResNet, "encoder": Encoder}[name]().to(dtype)
    kind, options, sort = (families.MODELS | MORE)[name]
    deep = {key: LAYERS if key in DEPTHS else value for key, value in options.items()}
    with patch.dict(families.MODELS, {name: (kind, deep, sort)}):
        return families.make_model(name).to(dtype)


def sort_of(name):
    return {"resnet": "image", "encoder": "encoder"}.get(name) or (families.MODELS | MORE)[name][2]


def rows_of(name, dtype):
    """Return samples; in each third one, next to nothing counts."""
    kinds = {name: (None, None, sort_of(name))}
    with patch.dict(families.MODELS, kinds), patch.object(families, "ROWS", ROWS):
        rows = families.Samples(name, "none" if sort_of(name) == "image" else "right").rows
    for number, row in enumerate(rows):
        row.update({k: v.to(dtype) for k, v in row.items() if v.is_floating_point()})
        if row["labels"].dim() and number % 3 == 0:
            row["labels"][2 + number % 4 :] = -100
        if row["labels"].dim() and number % ROWS == 4:
            row["labels"][:] = -100
    return rows


def step(model, batch):
    output = model(**batch)
    counted = batch["labels"] != -100
    if counted.dim() == 2 and "decoder" in getattr(model, "kind", ""):
        counted = counted[:, 1:]
    return {"loss": getattr(output, "loss", output), "weight": counted.sum()}


def train(name, backend, dtype=torch.float64, **options):
    """Train for three steps; return the losses and the weights, or the refusal."""
    with families.all_in_float64() if dtype == torch.float64 else nullcontext():
        return _train(name, backend, dtype, **options)


def _train(name, backend, dtype, **options):
    import transformers

    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    model = make_model(name, dtype)
    model.kind = sort_of(name)
    given = {backend: options} if options else {}
    try:
        with Trainer(backend=backend, devices="cpu", progress=False, seed=0, options=given) as trainer:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            loader = DataLoader(rows_of(name, dtype), batch_size=ROWS)
            history = trainer.fit(model, optimizer, loader, step=step, epochs=1, clip_norm=1.0)
            losses = [history[0].train["loss"]]
            state = {n: t.clone() for n, t in trainer.session.model_state(model).items()}
        return losses, state
    except TpError as error:
        return "refused", str(error)


def fit(trainer, model, optimizer, rows, step=step, **arguments):
    """Train two epochs of uneven batches; return losses, weights, and the elements of the optimizer here."""
    history = trainer.fit(
        model,
        optimizer,
        DataLoader(rows, batch_size=8),
        step=step,
        validation=DataLoader(rows[:5], batch_size=4),
        epochs=2,
        clip_norm=0.5,
        **arguments,
    )
    state = {n: t.clone() for n, t in trainer.session.model_state(model).items()}
    kept = sum(v.numel() for one in optimizer.state.values() for v in one.values() if v.dim())
    losses = [loss for record in history for loss in (record.train["loss"], record.val["loss"])]
    return losses, state, kept


def assert_same(found, expected, tolerance=1e-12):
    assert families.difference(found[:2], expected[:2]) < tolerance


def join():
    """Join the process group in which all rows of the table run."""
    torch.set_num_threads(1)
    join_process_group(LaunchEnvironment.read())


def outcome(pool, name, schedule, dtype, expected):
    """Return "right", "wrong" or "refused", with the difference or the reason."""
    # DualPipeV has at least as many micro-batches as stages; uneven ones where possible.
    uneven = {"GPipe": 5, "1F1B": 7, "LoopedBFS": 5, "ZBVZeroBubble": 6}
    parts = 2 * pool.processes if schedule == "DualPipeV" else uneven.get(schedule, 4)
    run = partial(train, name, "pipeline", dtype, schedule=schedule, microbatches=parts)
    found = pool.run(run)
    if isinstance(found[0][0], str):
        return found[0]
    worst = max(families.difference(one, expected) for one in found)
    return ("right" if worst <= TOLERANCES[dtype] else "wrong"), f"{worst:.1e}"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("models", nargs="*", default=list(MODELS))
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--schedules", nargs="+", default=list(SCHEDULES))
    parser.add_argument("--types", nargs="+", default=["float64", "float32"])
    parser.add_argument("--width", type=int, default=160)
    given = parser.parse_args()
    counts, began = {}, time.monotonic()
    pools = {ranks: RankPool(ranks, setup=join) for ranks in given.ranks}
    for name in given.models:
        for dtype in (getattr(torch, one) for one in given.types):
            expected = train(name, "single", dtype)
            for ranks, pool in pools.items():
                for schedule in given.schedules:
                    result, said = outcome(pool, name, schedule, dtype, expected)
                    counts[result] = counts.get(result, 0) + 1
                    row = f"{ranks} ranks  {str(dtype)[6:]}  {name:10} {schedule:22} {result:8}"
                    print(f"{row} {said:.{given.width}}", flush=True)
    for pool in pools.values():
        pool.close()
    print(counts, f"{time.monotonic() - began:.0f} s")
    return counts.get("wrong", 0)


if __name__ == "__main__":
    sys.exit(main())
