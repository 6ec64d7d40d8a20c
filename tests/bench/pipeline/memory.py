"""The memory of each rank of a model in stages: python -m tests.bench.pipeline.memory [WORDS ...]

Measured is the most that was resident beyond what was before the model was made, in a fit of two steps, as
``tests.bench.trainer.memory`` measures it; predicted is what `tp estimate` computes for each rank. With words
given, only cases with one of them are measured, and the figures of the others stay.
"""

import gc
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import tp_shard as ts
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from tp_core import LaunchEnvironment, resolve_devices
from tp_core.plugins import Job
from tp_pipeline import PipelineOptions
from tp_pipeline._stage_memory import memory_of_ranks  # private: estimates name the fullest rank alone
from tp_testing import run_ranks
from tp_trainer import Trainer
from tp_trainer._memory import measure_footprint

from tests.bench._results import Results
from tests.bench.pipeline.steps import WIDTH, Block
from tests.bench.trainer.layout_memory import LEAST_WORDS, deep, gpt2
from tests.bench.trainer.memory import MIB, resident, word_loss

WORDS, TOKENS, ROWS, BLOCKS, PARTS = 4000, 128, 32, 8, 8


@dataclass(frozen=True)
class Case:
    """A model in stages, and how it is trained.

    With ``data``, two groups of ranks hold a model each; with ``split``, as many ranks split each tensor.
    """

    ranks: int
    schedule: str
    model: str = "layers"
    precision: Any = "fp32"
    data: str = ""
    split: int = 1

    def __str__(self) -> str:
        more = [self.model] * (self.model != "layers") + [self.precision] * (self.precision != "fp32")
        more += [f"data={self.data}"] * bool(self.data) + ["split tensors"] * (self.split > 1)
        return ", ".join([f"{self.ranks} ranks", self.schedule, *more])

    @property
    def copies(self) -> int:
        return 2 if self.data else 1

    @property
    def places(self) -> int:
        """The number of ranks with other stages."""
        return self.ranks // self.copies // self.split

    def options(self) -> PipelineOptions:
        return PipelineOptions(
            ranks=self.places,
            schedule=self.schedule,  # type: ignore[arg-type]  # of names
            microbatches=PARTS,
            data=self.data or "ddp",  # type: ignore[arg-type]
            weights="shard" if self.split > 1 else "whole",
        )


CASES = [
    *(Case(n, s) for n in (2, 4) for s in ("GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble")),
    *(Case(2, s, m) for m in ("GPT-2", "Llama") for s in ("1F1B", "Interleaved1F1B")),
    Case(2, "1F1B", precision="bf16-mixed"),
    Case(2, "1F1B", "Llama", precision="bf16-mixed"),
    Case(4, "1F1B", data="ddp"),
    Case(4, "1F1B", data="fsdp"),
    Case(4, "Interleaved1F1B", "Llama", data="fsdp"),
    Case(4, "1F1B", "Llama", split=2),
    Case(4, "Interleaved1F1B", "GPT-2", split=2),
]


def layers() -> nn.Module:
    blocks = (Block() for _ in range(BLOCKS))
    return nn.Sequential(nn.Embedding(WORDS, WIDTH), *blocks, nn.Linear(WIDTH, WORDS))


def layers_loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, Any], Tensor], int]] = {
    "layers": (layers, layers_loss, WORDS),
    "GPT-2": (lambda: gpt2(BLOCKS), word_loss, LEAST_WORDS),
    "Llama": (deep, word_loss, LEAST_WORDS),
}


def make(case: Case) -> tuple[nn.Module, torch.optim.Optimizer, list[Tensor]]:
    """Return a model, its optimizer, and a batch of one group of ranks."""
    make_model, _, words = MODELS[case.model]
    model = make_model()
    tokens = torch.randint(words, (2, ROWS // case.copies, TOKENS))
    if case.split > 1:
        plan = ts.plans.auto(model, {"input_ids": tokens[0, :2, :8]}, verbose=False)
        model = ts.parallelize(model, plan)
    return model, torch.optim.AdamW(model.parameters()), list(tokens)


def peak(case: Case) -> int:
    """Return the bytes that a fit adds to what was resident before its model was made."""
    torch.set_num_threads(1)
    form_groups(case)
    before = 0
    for steps in (1, 2):  # the first one brings what libraries take
        model, optimizer, batch = make(case)
        gc.collect()  # finding a plan leaves memory
        before = resident("VmRSS") - sum(t.nbytes for t in (*model.parameters(), *batch))
        Path("/proc/self/clear_refs").write_text("5", "ascii")
        rows = TensorDataset(*(t.repeat(steps * case.copies, 1) for t in batch))
        loader = DataLoader(rows, batch_size=ROWS)
        options = {"precision": case.precision, "options": case.options()}
        with Trainer(backend="pipeline", devices="cpu", progress=False, **options) as trainer:
            trainer.fit(model, optimizer, loader, step=MODELS[case.model][1])
        del model, optimizer, batch, loader, trainer
    return resident("VmHWM") - before


def form_groups(case: Case) -> None:
    if case.split > 1:
        ts.distributed.init_process_group(case.split)


def predicted(case: Case) -> list[int]:
    """Return the bytes that each rank needs."""
    form_groups(case)
    model, optimizer, batch = make(case)
    job = Job(
        devices=resolve_devices("cpu"),
        environment=LaunchEnvironment(world_size=case.ranks, local_world_size=case.ranks),
        model=model,
        precision=case.precision,
        footprint=measure_footprint(model, optimizer, batch, MODELS[case.model][1], precision=case.precision),
    )
    needs = memory_of_ranks(job, case.places, case.options(), split=case.split)
    return [need.total for need in needs for _ in range(case.split)] * case.copies


def main(wanted: list[str]) -> None:
    os.environ["MALLOC_MMAP_THRESHOLD_"] = os.environ["MALLOC_TRIM_THRESHOLD_"] = str(2**16)
    with Results("pipeline-memory", is_part=bool(wanted)) as results:
        for case in CASES:
            if wanted and not any(word in str(case) for word in wanted):
                continue
            measured = run_ranks(peak, case.ranks, case)
            expected = run_ranks(predicted, case.ranks, case)[0]
            for rank, pair in enumerate(zip(expected, measured, strict=True)):
                results.add(f"{case}, rank {rank}: predicted", pair[0] / MIB, "MiB")
                results.add(f"{case}, rank {rank}: measured", pair[1] / MIB, "MiB")
                results.add(f"{case}, rank {rank}: ratio", pair[0] / pair[1], "")


if __name__ == "__main__":
    from tests.bench.pipeline import memory as program  # so that ranks import it by its name

    program.main(sys.argv[1:])
