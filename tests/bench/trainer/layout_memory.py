"""Estimates of the memory of layouts, beside what is measured: python -m tests.bench.trainer.layout_memory

``measured``: the fullest rank of layouts of each backend, in a fit of three steps, as
``tests.bench.trainer.memory`` measures it; with a number after it, layouts of that many ranks alone. The
model is one of transformers, made small. ``published``: what torchtitan has published of Llama 3.1 8B, beside
what estimates say of it.
"""

import gc
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import torch
import tp_shard as ts
from torch import nn
from torch.utils.data import DataLoader
from tp_core import LaunchEnvironment
from tp_core.jobs import Axis, Layout, MemoryNeed, Recomputation
from tp_core.plugins import Job, registry
from tp_testing import run_ranks
from tp_trainer import Trainer
from tp_trainer._footprints import StepFootprints  # private: `estimate` adds the choice of options

from tests.bench._results import Results
from tests.bench.trainer.memory import MIB, STEPS, Samples, resident, texts, word_loss

SAMPLES, LENGTH = 8, 128
LEAST_WORDS = 2000
CHOSEN = {
    2: [
        "pipeline, pipeline 2, 1F1B, 4",
        "pipeline, pipeline 2, InterleavedZeroBubble, 4",
        "pipeline, pipeline 2, Interleaved1F1B, 4",
        "fsdp, fsdp 2, gathered once",
        "ddp, data 2",
        "fsdp, fsdp 2, gathered twice",
        "context, context 2, gathered once",
        "context, context 2",
        "context, context 2, gathered twice",
    ],
    4: [
        "pipeline, data 2 x pipeline 2, InterleavedZeroBubble, 4",
        "pipeline, data 2 x pipeline 2, Interleaved1F1B, 4",
        "pipeline, data 2 x pipeline 2, 1F1B, 4",
        "shard, fsdp 2 x tensor 2, gathered once",
        "shard, data 2 x tensor 2",
        "pipeline, pipeline 4, 1F1B, 8",
        "shard, fsdp 2 x tensor 2, gathered twice",
        "shard, tensor 4",
        "fsdp, fsdp 4, gathered once",
        "fsdp, data 2 x fsdp 2, gathered once",
        "ddp, data 4",
        "fsdp, data 2 x fsdp 2, gathered twice",
        "fsdp, fsdp 4, gathered twice",
        "context, context 2 x pipeline 2, InterleavedZeroBubble, 4",
        "context, context 2 x pipeline 2, Interleaved1F1B, 4",
        "context, context 2 x pipeline 2, 1F1B, 4",
        "pipeline, fsdp 2 x pipeline 2, InterleavedZeroBubble, 4",
        "pipeline, fsdp 2 x pipeline 2, Interleaved1F1B, 4",
        "context, context 2 x pipeline 2, InterleavedZeroBubble, 8",
        "context, context 2 x pipeline 2, Interleaved1F1B, 8",
    ],
    8: [
        "shard, fsdp 2 x tensor 4, gathered once",
        "context, data 2 x context 2 x pipeline 2, InterleavedZeroBubble, 4",
        "fsdp, fsdp 8, gathered once",
        "ddp, data 8",
        "context, context 2 x pipeline 4, 1F1B, 8",
    ],
}


def llama(width: int = 384, layers: int = 4, words: int = LEAST_WORDS) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": layers}
    config = LlamaConfig(**sizes, num_attention_heads=8, vocab_size=words)
    return LlamaForCausalLM(config)


def gpt2(layers: int = 4) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": 384, "n_layer": layers, "n_head": 8, "vocab_size": LEAST_WORDS}
    return GPT2LMHeadModel(GPT2Config(**sizes, loss_type="ForCausalLM"))


def deep() -> nn.Module:
    return llama(width=256, layers=8)


def wordy() -> nn.Module:
    return llama(words=32000)


def sample(i: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = texts(LENGTH)(i)[0] % LEAST_WORDS
    return ids, ids


def layouts_of(job: Job, backend: str) -> Iterator[tuple[str, Layout]]:
    """Yield the layouts of a backend by their names: axes, and how they differ from others of the same."""
    (chosen,) = [found.item for found in registry.backends() if found.item.name == backend]
    for layout in chosen.layouts(job):
        sizes = {axis: layout.axes.get(axis, 1) for axis in get_args(Axis)}
        name = [" x ".join(f"{axis} {ranks}" for axis, ranks in sizes.items() if ranks > 1)]
        for options in layout.options.values():
            name += [str(options[key]) for key in ("schedule", "microbatches") if key in options]
            sharded = options if "reshard_after_forward" in options else vars_of(options.get("data"))
            if "reshard_after_forward" in sharded:
                name.append("gathered twice" if sharded["reshard_after_forward"] else "gathered once")
        yield ", ".join([backend, *name]), layout


def vars_of(options: object) -> dict[str, Any]:
    """Return the fields of an object of options; none of a name such as "ddp"."""
    again = getattr(options, "reshard_after_forward", None)
    return {} if again is None else {"reshard_after_forward": again}


def need_of(job: Job, backend: str, layout: Layout, footprints: StepFootprints, samples: int) -> MemoryNeed:
    """Return the memory of the fullest rank, where each reader gets its part of some samples."""
    (chosen,) = [found.item for found in registry.backends() if found.item.name == backend]
    what = job.recomputation or "nothing"
    footprint = footprints.measure(samples // layout.readers, what)
    footprint = replace(footprint, part=layout.readers / layout.ranks)
    found = chosen.estimate_memory(replace(job, options=layout.options, footprint=footprint))
    if found is None or found.activations is None:
        raise RuntimeError(f"no estimate of {backend} {layout}: {footprint.unknown}")
    return found


def fit(backend: str, layout: Layout, steps: int, splits: Any) -> None:
    """Train the model in a layout; where its tensors are split, by a plan that was found before."""
    is_split = backend == "shard"
    if is_split:
        ts.distributed.init_process_group(layout.axes["tensor"])
    model = ts.parallelize(wordy(), splits) if is_split else wordy()
    loader = DataLoader(Samples(sample, SAMPLES * steps), batch_size=SAMPLES)
    options = dict(layout.options)
    with Trainer(backend=backend, devices="cpu", options=options, progress=False, seed=0) as trainer:
        trainer.fit(model, torch.optim.AdamW(model.parameters(), lr=1e-4), loader, step=word_loss)
    if is_split:
        ts.distributed.destroy_process_group()


def peaks(layouts: Iterable[tuple[str, Layout]], splits: Any) -> list[int]:
    """Return the bytes that each layout adds to what was resident before its model was made."""
    torch.set_num_threads(1)
    found = []
    for number, (backend, layout) in enumerate(layouts):
        if number == 0:
            fit(backend, layout, 1, splits)  # what libraries take at first
        gc.collect()  # models of the layout before, which are in cycles
        before = resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5", "ascii")
        fit(backend, layout, STEPS, splits)
        found.append(resident("VmHWM") - before)
    return found


def measured(results: Results, wanted: str = "") -> None:
    os.environ["MALLOC_MMAP_THRESHOLD_"] = os.environ["MALLOC_TRIM_THRESHOLD_"] = str(2**16)
    tokens = torch.stack([sample(i)[0] for i in range(2)])
    splits = ts.plans.auto(wordy(), {"input_ids": tokens}, verbose=False)
    model = wordy()
    optimizer = torch.optim.AdamW(model.parameters())
    batch = [torch.stack(column) for column in zip(*(sample(i) for i in range(2)), strict=True)]
    device = torch.device("cpu")
    footprints = StepFootprints(model, optimizer, batch, word_loss, "fp32", device)
    for ranks, names in CHOSEN.items():
        if wanted not in ("", str(ranks)):
            continue
        job = Job(
            devices=(device,),
            environment=LaunchEnvironment(world_size=ranks, local_world_size=ranks),
            model=model,
            recomputation="nothing",
        )
        backends = dict.fromkeys(name.partition(",")[0] for name in names)
        known = {name: layout for backend in backends for name, layout in layouts_of(job, backend)}
        chosen = [(name.partition(",")[0], known[name]) for name in names]
        own = run_ranks(peaks, ranks, chosen, splits, timeout_s=1800)
        for number, (name, (backend, layout)) in enumerate(zip(names, chosen, strict=True)):
            peak = max(each[number] for each in own)
            need = need_of(job, backend, layout, footprints, SAMPLES)
            label = f"{name}, {ranks} ranks"
            results.add(f"{label}: predicted", need.total / MIB, "MiB")
            results.add(f"{label}: measured", peak / MIB, "MiB")
            results.add(f"{label}: ratio", need.total / peak, "")


# -- Estimates beside figures that others have published --------------------------------------------

# torchtitan, benchmarks/llama3_h100_202412_torchtitan.md: Llama 3.1 8B on H100s of 96 GB, parameters in
# float32 that are gathered in bfloat16; GiB. Table 1: fully_shard, 8,192 tokens, two samples on each,
# selective activation checkpointing. Table 2: 8 GPUs, fsdp x context, one sample, every block again.
PRINTED = {8: 82.4, 128: 67.0}
CONTEXT = {1: 83.9, 2: 84.2, 4: 84.0, 8: 84.5}
WIDTH, HIDDEN, HEADS, KEYS, WORDS = 4096, 14336, 32, 8, 128256


class Block(nn.Module):
    """A block of Llama 3.1 8B: (batch, tokens, width) and rotations -> the same as the first."""

    def __init__(self) -> None:
        super().__init__()
        each = WIDTH // HEADS
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.q, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(WIDTH, KEYS * each, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: torch.Tensor, rotations: torch.Tensor) -> torch.Tensor:
        h, size = self.norms[0](x), (-1, WIDTH // HEADS)
        q, k, v = (layer(h).unflatten(-1, size) for layer in (self.q, self.k, self.v))
        q, k = rotated(q, rotations), rotated(k, rotations)
        k, v = (t.repeat_interleave(HEADS // KEYS, dim=2) for t in (k, v))
        y = nn.functional.scaled_dot_product_attention(
            *(t.transpose(1, 2) for t in (q, k, v)), is_causal=True
        )
        x = x + self.out(y.transpose(1, 2).flatten(2))
        h = self.norms[1](x)
        y = self.down(nn.functional.silu(self.gate(h)) * self.up(h))
        return x + y


def rotated(x: torch.Tensor, rotations: torch.Tensor) -> torch.Tensor:
    """Rotate pairs of (batch, tokens, heads, features), in float32 as torchtitan does."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * rotations[:, None]).flatten(3).type_as(x)


class Llama(nn.Module):
    """Llama 3.1 8B, written as torchtitan does: tokens (batch, tokens) -> logits."""

    def __init__(self, layers: int = 32) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens)
        angles = torch.outer(torch.arange(tokens.shape[1]), torch.ones(WIDTH // HEADS // 2))
        rotations = torch.polar(torch.ones_like(angles), angles)
        for block in self.blocks:
            x = block(x, rotations)
        return self.head(self.norm(x))


def next_word_loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())


class HalfFootprints(StepFootprints):
    """Footprints of a step in bfloat16 with states in float32."""

    def measure(self, samples: int, recomputation: Recomputation) -> Any:
        half = super().measure(samples, recomputation)
        return replace(half, weights=2 * half.weights, gradients=2 * half.gradients)


def nbytes_8b(length: int, samples: int, layout: Layout, backend: str, what: Recomputation) -> int:
    """Return the bytes of the fullest rank, with so many samples for each reader."""
    with torch.device("meta"):
        model, tokens = Llama(), torch.zeros(samples, length, dtype=torch.long)
    job = Job(
        devices=(torch.device("cuda", 0),),
        environment=LaunchEnvironment(world_size=layout.ranks, local_world_size=8),
        model=model,
        precision="bf16-mixed",
        recomputation=what,
    )
    footprints = HalfFootprints(model, None, tokens, next_word_loss, "bf16-true")
    return need_of(job, backend, layout, footprints, samples * layout.readers).total


def published(results: Results) -> None:
    fsdp = {"reshard_after_forward": True, "activation_checkpointing": False, "offload": False}
    whats: tuple[Recomputation, ...] = ("nothing", "all but matmuls", "every block")
    for what in whats:
        for ranks, memory in PRINTED.items():
            layout = Layout(axes={"fsdp": ranks}, options={"fsdp": fsdp})
            nbytes = nbytes_8b(8192, 2, layout, "fsdp", what)
            label = f"Llama 3.1 8B, fsdp {ranks}, {what} again: predicted"
            results.add(label, nbytes / 2**30, "GiB", note=f"printed {memory}")
    for context, memory in CONTEXT.items():
        length = 32768 * context
        options = {"fsdp": fsdp, "context": {"context": context, "weights": "fsdp"}}
        layout = Layout(axes={"fsdp": 8 // context, "context": context}, options=options)
        backend = "context" if context > 1 else "fsdp"
        nbytes = nbytes_8b(length, 1, layout, backend, "every block")
        label = f"Llama 3.1 8B, fsdp {8 // context} x context {context}, {length} tokens: predicted"
        results.add(label, nbytes / 2**30, "GiB", note=f"printed {memory}")


def main(wanted: list[str]) -> None:
    if not wanted or "measured" in wanted:
        with Results("trainer-layout-memory", is_part=len(wanted) > 1) as results:
            measured(results, *wanted[1:])
    if not wanted or "published" in wanted:
        with Results("trainer-published-memory") as results:
            published(results)


if __name__ == "__main__":
    main(sys.argv[1:])
