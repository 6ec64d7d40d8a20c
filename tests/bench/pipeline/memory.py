"""The memory of each rank of a model in stages: python -m tests.bench.pipeline.memory

Measured is the most that was resident beyond what was before the model was made, in a fit of two steps, as
``tests.bench.trainer.memory`` measures it; predicted is what `tp estimate` computes for each rank.
"""

import argparse
import gc
import os
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from tp_core import LaunchEnvironment, resolve_devices
from tp_core.plugins import Job
from tp_core.testing import run_ranks
from tp_pipeline import PipelineOptions
from tp_pipeline._forecast import memory_of_ranks  # private: estimates name the fullest rank alone
from tp_trainer import Trainer
from tp_trainer._memory._footprint import measure_footprint

from tests.bench._results import Results
from tests.bench.pipeline.steps import WIDTH, Block
from tests.bench.trainer.memory import MIB, resident

WORDS, TOKENS, ROWS, BLOCKS, PARTS = 4000, 128, 32, 8, 8
SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble")


def make() -> tuple[nn.Module, torch.optim.Optimizer, list[Tensor]]:
    layers = [nn.Embedding(WORDS, WIDTH), *(Block() for _ in range(BLOCKS)), nn.Linear(WIDTH, WORDS)]
    model = nn.Sequential(*layers)
    return model, torch.optim.AdamW(model.parameters()), list(torch.randint(WORDS, (2, ROWS, TOKENS)))


def step(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def peak(schedule: str) -> int:
    """Return the bytes that a fit adds to what was resident before its model was made."""
    torch.set_num_threads(1)
    options = {"pipeline": {"schedule": schedule, "microbatches": PARTS}}
    before = 0
    for steps in (1, 2):  # the first one brings what libraries take
        gc.collect()
        before = resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5", "ascii")
        model, optimizer, batch = make()
        loader = DataLoader(TensorDataset(*(t.repeat(steps, 1) for t in batch)), batch_size=ROWS)
        with Trainer(backend="pipeline", devices="cpu", progress=False, options=options) as trainer:
            trainer.fit(model, optimizer, loader, step=step)
        del model, optimizer, batch, loader, trainer
    return resident("VmHWM") - before


def predicted(schedule: str, ranks: int) -> list[int]:
    """Return the bytes that each rank needs."""
    model, optimizer, batch = make()
    job = Job(
        devices=resolve_devices("cpu"),
        environment=LaunchEnvironment(world_size=ranks, local_world_size=ranks),
        model=model,
        footprint=measure_footprint(model, optimizer, batch, step),
    )
    options = PipelineOptions(schedule=schedule, microbatches=PARTS)  # type: ignore[arg-type]  # of names
    return [need.total for need in memory_of_ranks(job, ranks, options)]


def main() -> None:
    os.environ["MALLOC_MMAP_THRESHOLD_"] = os.environ["MALLOC_TRIM_THRESHOLD_"] = str(2**16)
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--schedules", nargs="+", default=list(SCHEDULES))
    arguments = parser.parse_args()
    with Results("pipeline-memory", is_part=arguments != parser.parse_args([])) as results:
        for ranks in arguments.ranks:
            for name in arguments.schedules:
                measured = run_ranks(peak, ranks, name)
                for rank, pair in enumerate(zip(predicted(name, ranks), measured, strict=True)):
                    case = f"{ranks} ranks, {name}, rank {rank}"
                    results.add(f"{case}: predicted", pair[0] / MIB, "MiB")
                    results.add(f"{case}: measured", pair[1] / MIB, "MiB")
                    results.add(f"{case}: ratio", pair[0] / pair[1], "")


if __name__ == "__main__":
    from tests.bench.pipeline import memory as program  # so that ranks import it by its name

    program.main()
