"""What `tp plan` says beside what is measured: python -m tests.bench.trainer.plan [memory | order | blind]

``memory``: the fullest rank of each layout, in a fit of three steps, as ``tests.bench.trainer.memory``
measures it. ``order``: layouts of three models on four ranks, by the plan with the rates that
``calibrate()`` measures first, and by the clock: Kendall's tau of both orders. The ranks take the layouts in
turns, several rounds of them, and the fastest step of each counts, so that what else the machine does falls
on all alike. Models are those of transformers, made small. ``blind``: what torchtitan has published, beside
what the plan says of it with rates that nothing was fitted to.
"""

import gc
import os
import sys
from collections.abc import Iterable
from itertools import combinations
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader
from tp_core import LaunchEnvironment
from tp_core.jobs import Layout
from tp_core.plugins import Job, registry
from tp_core.testing import run_ranks
from tp_trainer import Trainer
from tp_trainer.planning import Links, Machine, calibrate, plan
from tp_trainer.planning._plan import time_of
from tp_trainer.planning._samples import Subject

from tests.bench._results import Results
from tests.bench.trainer.memory import MIB, STEPS, Samples, resident, texts, word_loss

SAMPLES, LENGTH, ROUNDS = 8, 128, 5


def llama(width: int = 384, layers: int = 4) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": layers}
    config = LlamaConfig(**sizes, num_attention_heads=8, vocab_size=32000)
    return LlamaForCausalLM(config)


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_embd=384, n_layer=4, n_head=8, loss_type="ForCausalLM"))


def deep() -> nn.Module:
    return llama(width=256, layers=8)


MODELS = {"Llama": llama, "GPT-2": gpt2, "deep Llama": deep}


def planned(name: str, ranks: int, machine: Machine | None = None, *, each: int = 99) -> list[Any]:
    """Return the layouts of a model, without split tensors, whose models a script makes itself."""
    model = MODELS[name]()
    optimizer = torch.optim.AdamW(model.parameters())
    batch = [torch.stack(column) for column in zip(*(texts(LENGTH)(i) for i in range(2)), strict=True)]
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
        is_split = layout.layout.axes.get("tensor", 1) > 1
        if not is_split and sum(k.backend == layout.backend for k in kept) < each:
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


def fit(name: str, layout: Any, steps: int) -> None:
    model = MODELS[name]()
    loader = DataLoader(Samples(texts(LENGTH), SAMPLES * steps), batch_size=SAMPLES)
    with trainer_of(layout) as trainer:
        trainer.fit(model, torch.optim.AdamW(model.parameters(), lr=1e-4), loader, step=word_loss)


def peaks(name: str, layouts: Iterable[Any]) -> list[int]:
    """Return the bytes that each layout adds to what was resident before its model was made."""
    torch.set_num_threads(1)
    found = []
    for number, layout in enumerate(layouts):
        if number == 0:
            fit(name, layout, 1)  # what libraries take at first
        gc.collect()  # models of the layout before, which are in cycles
        before = resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5", "ascii")
        fit(name, layout, STEPS)
        found.append(resident("VmHWM") - before)
    return found


def memory(results: Results) -> None:
    os.environ["MALLOC_MMAP_THRESHOLD_"] = os.environ["MALLOC_TRIM_THRESHOLD_"] = str(2**16)
    for ranks in (2, 4):
        layouts = planned("Llama", ranks, each=3)
        measured = [max(own) for own in zip(*run_ranks(peaks, ranks, "Llama", layouts), strict=True)]
        for layout, peak in zip(layouts, measured, strict=True):
            label = f"{layout.backend}, {layout.name}, {ranks} ranks"
            results.add(f"{label}: predicted", layout.memory.total / MIB, "MiB")
            results.add(f"{label}: measured", peak / MIB, "MiB")
            results.add(f"{label}: ratio", layout.memory.total / peak, "")


def steps(name: str, layouts: list[Any]) -> list[float]:
    """Return the seconds of the fastest step of each layout."""
    torch.set_num_threads(1)
    best = [float("inf")] * len(layouts)
    for _ in range(ROUNDS):
        for number, layout in enumerate(layouts):
            with trainer_of(layout) as trainer:
                model = MODELS[name]()
                made = trainer.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-4))
                loader = DataLoader(Samples(texts(LENGTH), SAMPLES * 3), batch_size=SAMPLES)
                seconds = []
                for part in trainer.prepare(loader):
                    dist.barrier()
                    began = perf_counter()
                    made[1].zero_grad()
                    trainer.backward(trainer.run(word_loss, made[0], part))
                    made[1].step()
                    dist.barrier()
                    seconds.append(perf_counter() - began)
                best[number] = min(best[number], *seconds[1:])
    return best


def tau(first: list[float], second: list[float]) -> float:
    """Return Kendall's rank correlation.

    Example:
        >>> tau([1, 2, 3], [1, 3, 2])
        0.3333333333333333
    """
    pairs = list(combinations(range(len(first)), 2))
    signs = [(first[a] - first[b]) * (second[a] - second[b]) for a, b in pairs]
    return (sum(s > 0 for s in signs) - sum(s < 0 for s in signs)) / len(pairs)


def order(results: Results) -> None:
    machine = calibrate(4)
    expected: list[float] = []
    found: list[float] = []
    for name in MODELS:
        layouts = planned(name, 4, machine, each=2)[:5]
        times = run_ranks(steps, 4, name, layouts)[0]
        for layout, seconds in zip(layouts, times, strict=True):
            label = f"{name}, {layout.backend}, {layout.name}"
            results.add(f"{label}: predicted", 1e3 * layout.time.total, "ms")
            results.add(f"{label}: measured", 1e3 * seconds, "ms")
        expected += [layout.time.total for layout in layouts]
        found += times
        results.add(f"{name}: Kendall's tau", tau([p.time.total for p in layouts], times), "")
    results.add("Kendall's tau", tau(expected, found), "")


# -- Predictions beside figures that others have published ------------------------------------------

# torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, tables 1 and 3: Llama 3.1 8B, FSDP, 8,192 tokens,
# two samples on each H100 of 96 GB, selective activation checkpointing. GiB; tokens per second and GPU.
PRINTED = {8: (82.4, 5762.0), 128: (67.0, 5605.0)}


def llama_8b() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8}
    config = LlamaConfig(**sizes, **heads, vocab_size=128256, max_position_embeddings=8192)
    with torch.device("meta"):
        return LlamaForCausalLM(config)


def blind(results: Results) -> None:
    """Forecast with tp's assumed rates of an H100: nothing is fitted to the figures."""
    model, machine = llama_8b(), Machine()
    tokens = torch.zeros(2, 8192, dtype=torch.long, device="meta")
    subject = Subject(model, None, (tokens, tokens), word_loss, "bf16-mixed")
    (fsdp,) = [c.item for c in registry.backends() if c.item.name == "fsdp"]
    for what in ("nothing", "every block"):
        needed = subject.measure(2, what)
        if needed.footprint.unknown:
            raise RuntimeError(needed.footprint.unknown)
        for ranks, (memory, rate) in PRINTED.items():
            options = {"reshard_after_forward": True, "activation_checkpointing": False, "offload": False}
            layout = Layout(axes={"fsdp": ranks}, options={"fsdp": options})
            job = Job(
                devices=(torch.device("cpu"),),
                environment=LaunchEnvironment(world_size=ranks, local_world_size=8),
                model=model,
                precision="bf16-mixed",
                options=layout.options,
                footprint=needed.footprint,
                recomputation=what,
            )
            found = fsdp.forecast(job, layout)
            links = Links.parse("node=8x450GB/s,between=50GB/s")
            time = time_of(needed, found.work, 1, machine, links, trained=1 / ranks)
            label = f"Llama 3.1 8B, fsdp {ranks}, {what} again"
            results.add(f"{label}: predicted", found.memory.total / 2**30, "GiB", note=f"printed {memory}")
            results.add(
                f"{label}: predicted rate", 2 * 8192 / time.total, "tokens/s", note=f"printed {rate:,.0f}"
            )


def main(wanted: list[str]) -> None:
    for name, measure in (("memory", memory), ("order", order), ("blind", blind)):
        if not wanted or name in wanted:
            with Results(f"trainer-plan-{name}") as results:
                measure(results)


if __name__ == "__main__":
    main(sys.argv[1:])
