"""What `tp plan` says beside what is measured: python -m tests.bench.trainer.plan [memory | order | blind]

``memory``: the fullest rank of each layout, in a fit of three steps, as ``tests.bench.trainer.memory``
measures it; with a number after it, layouts of that many ranks alone. ``order``: layouts of three models on
four and on eight ranks, by the plan with the rates that ``calibrate()`` measures first, and by the clock:
Kendall's tau of both orders. Of a model these are the fastest layout of each backend, then the slowest of
each, five together. The ranks take the layouts in turns, several rounds of them, and the fastest step of
each counts, so that what else the machine does falls on all alike. Models are those of transformers, made
small. ``blind``: what torchtitan and Megatron-LM have published, beside what the plan says of it with rates
that nothing was fitted to.
"""

import gc
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
import tp_shard as ts
from torch import nn
from torch.utils.data import DataLoader
from tp_core import LaunchEnvironment
from tp_core.internal import averaged_gradients
from tp_core.jobs import Layout, StepWork
from tp_core.plugins import Job, registry
from tp_testing import run_ranks
from tp_trainer import Trainer
from tp_trainer.planning import Links, Machine, calibrate, plan
from tp_trainer.planning._machine import Operators
from tp_trainer.planning._plan import time_of
from tp_trainer.planning._samples import Measured, Subject

from tests.bench._results import Results
from tests.bench.trainer.memory import MIB, STEPS, Samples, resident, texts, word_loss

SAMPLES, LENGTH, ROUNDS, TIMED = 8, 128, 3, 3
LEAST_WORDS = 2000


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


MODELS = {"Llama": llama, "GPT-2": gpt2, "deep Llama": deep}
ALL = {**MODELS, "Llama with many words": wordy}


def sample(i: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = texts(LENGTH)(i)[0] % LEAST_WORDS
    return ids, ids


def planned(
    name: str,
    ranks: int,
    machine: Machine | None = None,
    *,
    each: int = 3,
    more: Mapping[str, int] | None = None,
) -> list[Any]:
    """Return the fastest layouts of each backend, so many; those of split tensors where ``more`` has some."""
    counts = dict(more or {"shard": 0})
    model = ALL[name]()
    optimizer = torch.optim.AdamW(model.parameters())
    batch = [torch.stack(column) for column in zip(*(sample(i) for i in range(2)), strict=True)]
    found = plan(
        model,
        optimizer,
        batch,
        word_loss,
        devices=ranks,
        links=f"node={ranks}x1GB/s",
        samples=SAMPLES,
        memory=2**40,
        machine=machine,
    )
    kept: list[Any] = []
    for layout in found.layouts:
        is_nested = layout.backend != "shard" and layout.layout.axes.get("tensor", 1) > 1
        most = counts.get(layout.backend, each)
        if not is_nested and sum(k.backend == layout.backend for k in kept) < most:
            kept.append(layout)
    return kept


def trainer_of(layout: Any) -> Trainer:
    return Trainer(
        backend=layout.backend,
        devices="cpu",
        options=dict(layout.layout.options),
        progress=False,
        seed=0,
    )


def fit(name: str, layout: Any, steps: int, splits: Any = None) -> None:
    """Train a model in a layout; where its tensors are split, by a plan that was found before."""
    is_split = layout.backend == "shard"
    if is_split:
        ts.distributed.init_process_group(layout.layout.axes["tensor"])
    model = ts.parallelize(ALL[name](), splits) if is_split else ALL[name]()
    loader = DataLoader(Samples(sample, SAMPLES * steps), batch_size=SAMPLES)
    with trainer_of(layout) as trainer:
        trainer.fit(model, torch.optim.AdamW(model.parameters(), lr=1e-4), loader, step=word_loss)
    if is_split:
        ts.distributed.destroy_process_group()


def peaks(name: str, layouts: Iterable[Any], splits: Any) -> list[int]:
    """Return the bytes that each layout adds to what was resident before its model was made."""
    torch.set_num_threads(1)
    found = []
    for number, layout in enumerate(layouts):
        if number == 0:
            fit(name, layout, 1, splits)  # what libraries take at first
        gc.collect()  # models of the layout before, which are in cycles
        before = resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5", "ascii")
        fit(name, layout, STEPS, splits)
        found.append(resident("VmHWM") - before)
    return found


def memory(results: Results, wanted: str = "") -> None:
    os.environ["MALLOC_MMAP_THRESHOLD_"] = os.environ["MALLOC_TRIM_THRESHOLD_"] = str(2**16)
    name = "Llama with many words"
    tokens = torch.stack([sample(i)[0] for i in range(2)])
    splits = ts.plans.auto(ALL[name](), {"input_ids": tokens}, verbose=False)
    for ranks, more in (
        (2, {"shard": 0}),
        (4, {"fsdp": 4, "shard": 4, "context": 5, "pipeline": 6}),
        (8, dict.fromkeys(("ddp", "fsdp", "shard", "context", "pipeline"), 1)),
    ):
        if wanted not in ("", str(ranks)):
            continue
        layouts = planned(name, ranks, replace(Machine(), is_ahead=False), more=more)  # of CPUs
        own = run_ranks(peaks, ranks, name, layouts, splits, timeout_s=1800)
        measured = [max(each) for each in zip(*own, strict=True)]
        for layout, peak in zip(layouts, measured, strict=True):
            label = f"{layout.backend}, {layout.name}, {ranks} ranks"
            results.add(f"{label}: predicted", layout.memory.total / MIB, "MiB")
            results.add(f"{label}: measured", peak / MIB, "MiB")
            results.add(f"{label}: ratio", layout.memory.total / peak, "")


def steps(layouts_of: Mapping[str, list[Any]]) -> dict[str, list[tuple[float, float]]]:
    """Return the seconds of the two fastest steps of each layout, by model: the same ranks do all."""
    torch.set_num_threads(1)
    found: dict[str, list[list[float]]] = {
        name: [[] for _ in layouts] for name, layouts in layouts_of.items()
    }
    for _ in range(ROUNDS):  # all models in each: the machine is faster now and slower then
        for name, layouts in layouts_of.items():
            for number, layout in enumerate(layouts):
                found[name][number] += timed_steps(name, layout)
    return {name: [tuple(sorted(each)[:2]) for each in found[name]] for name in found}


def timed_steps(name: str, layout: Any) -> list[float]:
    """Return the seconds of some steps; one before, in which backends check, does not count."""
    with trainer_of(layout) as trainer:
        model = ALL[name]()
        made = trainer.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-4))
        loader = DataLoader(Samples(sample, SAMPLES * (1 + TIMED)), batch_size=SAMPLES)
        seconds = []
        for part in trainer.prepare(loader):
            dist.barrier()
            began = perf_counter()
            made[1].zero_grad()
            trainer.backward(trainer.run(word_loss, made[0], part))
            made[1].step()
            dist.barrier()
            seconds.append(perf_counter() - began)
        return seconds[1:]


def tau(expected: list[float], measured: list[tuple[float, float]], *, apart: bool = False) -> float:
    """Return Kendall's rank correlation of seconds and the two fastest measured ones of each.

    With ``apart``, pairs are left out of which the second fastest step of one took as long as the fastest of
    the other: the clock does not order them.

    Example:
        >>> tau([1, 2, 3], [(1, 1), (3, 4), (2, 2)])
        0.3333333333333333
    """
    signs = [
        (expected[a] - expected[b]) * (measured[a][0] - measured[b][0])
        for a, b in pairs_of(measured, apart=apart)
    ]
    return (sum(s > 0 for s in signs) - sum(s < 0 for s in signs)) / max(1, len(signs))


def pairs_of(measured: list[tuple[float, float]], *, apart: bool) -> list[tuple[int, int]]:
    pairs = combinations(sorted(range(len(measured)), key=measured.__getitem__), 2)
    return [(a, b) for a, b in pairs if not apart or measured[a][1] < measured[b][0]]


def spread(layouts: list[Any]) -> list[Any]:
    """Return the fastest layout of each backend, then the slowest of each, five together."""
    fastest = {p.backend: p for p in reversed(layouts)}
    slowest = {p.backend: p for p in layouts}
    found = {id(p): p for p in sorted(fastest.values(), key=layouts.index)}
    found |= {id(p): p for p in sorted(slowest.values(), key=layouts.index, reverse=True)}
    return list(found.values())[:5]


def order(results: Results) -> None:
    for ranks in (4, 8):
        began = perf_counter()
        machine = calibrate(ranks)
        results.add(f"{ranks} ranks: calibrating", perf_counter() - began, "s")
        layouts_of = {name: spread(planned(name, ranks, machine, each=99)) for name in MODELS}
        times = run_ranks(steps, ranks, layouts_of, timeout_s=1800)[0]
        expected = {name: [p.time.total for p in layouts] for name, layouts in layouts_of.items()}
        for name, layouts in layouts_of.items():
            for layout, seconds in zip(layouts, times[name], strict=True):
                label = f"{ranks} ranks, {name}, {layout.backend}, {layout.name}"
                results.add(f"{label}: predicted", 1e3 * layout.time.total, "ms")
                results.add(f"{label}: measured", 1e3 * seconds[0], "ms")
                results.add(f"{label}: measured second", 1e3 * seconds[1], "ms")
        both = [[t for name in MODELS for t in found[name]] for found in (expected, times)]
        for what, apart in (("", False), (", apart", True)):
            end = f"Kendall's tau{what}"
            for name in MODELS:
                results.add(
                    f"{ranks} ranks, {name}: {end}", tau(expected[name], times[name], apart=apart), ""
                )
            counts = {name: len(pairs_of(times[name], apart=apart)) for name in MODELS}
            agreed = sum(n * tau(expected[name], times[name], apart=apart) for name, n in counts.items())
            results.add(f"{ranks} ranks: {end} within models", agreed / max(1, sum(counts.values())), "")
            results.add(f"{ranks} ranks: {end}", tau(*both, apart=apart), "")
            results.add(f"{ranks} ranks: pairs{what}", len(pairs_of(both[1], apart=apart)), "")


# -- Predictions beside figures that others have published ------------------------------------------

# torchtitan, benchmarks/llama3_h100_202412_torchtitan.md: Llama 3.1 8B on H100s of 96 GB, parameters in
# float32 that are gathered in bfloat16. GiB; tokens per second and GPU.
# Tables 1 and 3: fully_shard, 8,192 tokens, two samples on each, selective activation checkpointing; eager,
# and with torch.compile.
PRINTED = {8: (82.4, 5762.0), 128: (67.0, 5605.0)}
COMPILED = {8: (77.0, 6667.0), 128: (62.0, 6514.0)}
# Table 2: 8 GPUs, fsdp x context, one sample, every block again; compiled, and with products in float8.
CONTEXT = {1: (83.9, 3890.0), 2: (84.2, 2540.0), 4: (84.0, 1071.0), 8: (84.5, 548.0)}
WIDTH, HIDDEN, HEADS, KEYS, WORDS = 4096, 14336, 32, 8, 128256
LINKS = Links.parse("node=8x450GB/s,between=50GB/s")

# Megatron-LM, README.md and images/ of release core_r0.8.0: GPT, 4,096 tokens, 131,072 words, H100s. Weak
# scaling, on 48 data ranks each: heads, width, layers, ranks for tensors and stages, samples of a step, and
# teraFLOP/s of one GPU. Strong scaling has the model of 177B with 1,152 samples, at 47 % of the peak on the
# fewest and 42 % on the most ranks; its layouts are not printed. All counts are multiples of 48, so the
# stages of that model's row are taken.
WEAK = {
    "1.7B": (16, 2048, 24, 1, 1, 192, 408.8),
    "7.1B": (32, 4096, 30, 2, 1, 192, 465.9),
    "16B": (48, 6144, 32, 4, 1, 192, 489.1),
    "32B": (56, 7168, 48, 8, 1, 192, 459.6),
    "70B": (64, 8192, 84, 8, 2, 384, 419.7),
    "119B": (80, 10240, 92, 8, 4, 768, 420.5),
    "177B": (96, 12288, 96, 8, 6, 1152, 432.8),
    "314B": (128, 16384, 96, 8, 8, 1536, 474.4),
    "462B": (144, 18432, 112, 8, 16, 3072, 459.9),
}
STRONG = {96: 47, 2304: 44, 4608: 42}
TOKENS, ENTRIES, PEAK = 4096, 131072, 989e12


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


def measured_8b(length: int, samples: int, what: Any) -> tuple[nn.Module, Measured]:
    """Return the model with what a device needs for it: computing in bfloat16, with states in float32."""
    with torch.device("meta"):
        model, tokens = Llama(), torch.zeros(samples, length, dtype=torch.long)
    found = Subject(model, None, tokens, next_word_loss, "bf16-true").measure(samples, what)
    if found.footprint.unknown:
        raise RuntimeError(found.footprint.unknown)
    half = found.footprint
    states = {"weights": 2 * half.weights, "gradients": 2 * half.gradients}
    return model, replace(found, footprint=replace(half, **states))


def fused(needed: Measured) -> Measured:
    """Return what is left to do where a compiler makes all else part of products."""

    def products(found: Operators) -> Operators:
        kept = found.flops > 0
        return Operators(found.flops[kept], found.nbytes[kept], found.times[kept])

    return replace(needed, forward=products(needed.forward), backward=products(needed.backward))


def predicted(
    model: nn.Module, needed: Measured, layout: Layout, backend: str, what: Any
) -> tuple[int, float]:
    """Return bytes and seconds by tp's assumed rates of an H100: nothing is fitted to the figures."""
    (chosen,) = [c.item for c in registry.backends() if c.item.name == backend]
    job = Job(
        devices=(torch.device("cuda", 0),),
        environment=LaunchEnvironment(world_size=layout.ranks, local_world_size=8),
        model=model,
        precision="bf16-mixed",
        options=layout.options,
        footprint=needed.footprint,
        recomputation=what,
    )
    found = chosen.forecast(job, layout)
    return found.memory.total, time_of(
        needed, found.work, 1, Machine(), LINKS, trained=1 / layout.ranks
    ).total


class GptBlock(nn.Module):
    """A block of GPT-3, without dropout: (batch, tokens, width) -> the same."""

    def __init__(self, heads: int, width: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.mix(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))


class GptModel(nn.Module):
    """A GPT with learned positions, whose head is its table: tokens (batch, tokens) -> logits."""

    def __init__(self, heads: int, width: int, layers: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(ENTRIES, width), nn.Embedding(TOKENS, width)
        self.blocks = nn.ModuleList(GptBlock(heads, width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, ENTRIES, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens) + self.places.weight
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Gpt:
    """A GPT of Megatron-LM's table, with what its steps need."""

    def __init__(self, heads: int, width: int, layers: int) -> None:
        with torch.device("meta"):
            self.model = GptModel(heads, width, layers)
            tokens = torch.zeros(2, TOKENS, dtype=torch.long)
        self.subject = Subject(self.model, None, tokens, next_word_loss, "bf16-true")
        # Of a sample: Narayanan et al., "Efficient large-scale language model training on GPU clusters using
        # Megatron-LM", 2021, with nothing computed again. Attention is over all pairs of tokens.
        self.flops = 72 * TOKENS * layers * width**2
        self.flops *= 1 + TOKENS / (6 * width) + ENTRIES / (12 * layers * width)

    def work_of(self, backend: str, layout: Layout, needed: Measured) -> StepWork:
        (chosen,) = [c.item for c in registry.backends() if c.item.name == backend]
        job = Job(
            devices=(torch.device("cuda", 0),),
            environment=LaunchEnvironment(world_size=layout.ranks, local_world_size=8),
            model=self.model,
            precision="bf16-true",
            options=layout.options,
            footprint=needed.footprint,
            recomputation="nothing",
        )
        found: StepWork = chosen.forecast(job, layout).work
        return found

    def reached(self, data: int, tensor: int, stages: int, samples: int) -> float:
        """Return the floating-point operations of a device in a second.

        Stages take the faster of 1F1B and its interleaved form with two stages on each rank. No backend
        forecasts stages of split tensors yet: here a rank does its part of both.
        """
        each, seconds = samples // data, []
        parts = each if stages > 1 else 1  # micro-batches of a sample in a batch
        needed = self.subject.measure(parts, "nothing")
        split = StepWork()
        if tensor > 1:
            options = {"shard": {"group_size": tensor, "data": "ddp"}}
            split = self.work_of("shard", Layout(axes={"tensor": tensor}, options=options), needed)
        for schedule in ("1F1B", "Interleaved1F1B") if stages > 1 else ("",):
            staged = StepWork()
            if stages > 1:
                options = {"pipeline": {"ranks": stages, "schedule": schedule, "microbatches": parts}}
                staged = self.work_of("pipeline", Layout(axes={"pipeline": stages}, options=options), needed)
            mine = staged.operations
            sums = [
                replace(t, nbytes=t.nbytes // parts, times=round(t.times * parts * mine))
                for t in split.transfers
            ]
            sends = [replace(t, stride=tensor) for t in staged.transfers]
            part = mine * split.operations
            gradients = int(needed.footprint.gradients * part)
            averages = averaged_gradients(gradients, data, stride=tensor * stages)
            work = replace(staged, operations=part, transfers=(*sums, *sends, *averages))
            time = time_of(needed, work, each // parts, Machine(), LINKS, trained=part / data)
            seconds.append(time.total)
        return samples * self.flops / min(seconds) / (data * tensor * stages)


def megatron(results: Results) -> None:
    for name, (heads, width, layers, tensor, stages, samples, printed) in WEAK.items():
        model = Gpt(heads, width, layers)
        ranks = 48 * tensor * stages
        reached = model.reached(48, tensor, stages, samples)
        label = f"GPT {name}, {ranks} devices: predicted"
        results.add(label, reached / 1e12, "TFLOP/s", note=f"printed {printed}")
        results.add(f"{label}, of the peak", 100 * reached / PEAK, "%", note=f"printed {printed / 9.89:.0f}")
        if name == "177B":
            for ranks, share in STRONG.items():
                reached = model.reached(ranks // (tensor * stages), tensor, stages, samples)
                label = f"GPT 177B, {samples} samples, {ranks} devices: predicted, of the peak"
                results.add(label, 100 * reached / PEAK, "%", note=f"printed {share}")


def blind(results: Results) -> None:
    fsdp = {"reshard_after_forward": True, "activation_checkpointing": False, "offload": False}
    for what in ("nothing", "all but matmuls", "every block"):
        model, needed = measured_8b(8192, 2, what)
        for ranks, (memory, rate) in PRINTED.items():
            layout = Layout(axes={"fsdp": ranks}, options={"fsdp": fsdp})
            nbytes, seconds = predicted(model, needed, layout, "fsdp", what)
            label = f"Llama 3.1 8B, fsdp {ranks}, {what} again"
            results.add(f"{label}: predicted", nbytes / 2**30, "GiB", note=f"printed {memory}")
            results.add(
                f"{label}: predicted rate", 2 * 8192 / seconds, "tokens/s", note=f"printed {rate:,.0f}"
            )
            _, seconds = predicted(model, fused(needed), layout, "fsdp", what)
            note = "compiled, printed {} GiB, {:,.0f}".format(*COMPILED[ranks])
            results.add(f"{label}: predicted rate, fused", 2 * 8192 / seconds, "tokens/s", note=note)
    for context, (memory, rate) in CONTEXT.items():
        length = 32768 * context
        model, needed = measured_8b(length, 1, "every block")
        options = {"fsdp": fsdp, "context": {"context": context, "weights": "fsdp"}}
        layout = Layout(axes={"fsdp": 8 // context, "context": context}, options=options)
        backend = "context" if context > 1 else "fsdp"
        nbytes, seconds = predicted(model, needed, layout, backend, "every block")
        label = f"Llama 3.1 8B, fsdp {8 // context} x context {context}, {length} tokens"
        results.add(f"{label}: predicted", nbytes / 2**30, "GiB", note=f"printed {memory}")
        here = length / seconds / context
        results.add(f"{label}: predicted rate", here, "tokens/s", note=f"printed {rate:,.0f}, in float8")
    megatron(results)


def main(wanted: list[str]) -> None:
    for name, measure in (("memory", memory), ("order", order), ("blind", blind)):
        if not wanted or name in wanted:
            more = wanted[1:] if name == "memory" else []
            with Results(f"trainer-plan-{name}", is_part=bool(more)) as results:
                measure(results, *more)


if __name__ == "__main__":
    main(sys.argv[1:])
