"""Saving and loading 1 GB of state that two ranks have split: python -m tests.bench.trainer.sharded_state

Against torch.distributed.checkpoint on the same DTensors, in the same two gloo processes, in turns. Ours has
digests made beside writing, and checked before loading; both bring what they write onto the disk, keep the
old files until the new ones are there, and load what the system has not in memory, as a run that goes on
elsewhere does.
"""

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from tp_core.state import collect_state
from tp_testing import run_ranks
from tp_trainer import Trainer

from tests.bench._results import Results
from tests.bench.trainer.checkpoints import checkpointer_of

WIDTH, LAYERS, ROUNDS = 4096, 15, 5  # layers of 64 MiB
TORCH, TP = "torch.distributed.checkpoint", "tp, with digests"


def timed(way: Callable[[], None]) -> float:
    """Return how long the slowest rank takes."""
    dist.barrier()
    began = time.perf_counter()
    way()
    seconds = torch.tensor(time.perf_counter() - began)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return seconds.item()


def forget(folder: Path) -> None:
    """Have the system keep nothing of the files of a folder in memory."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def times_of_rank(folder: Path) -> tuple[int, dict[str, list[float]]]:
    """Return the bytes of the whole state, and the seconds of each way, round by round."""
    torch.set_num_threads(1)
    with Trainer(backend="fsdp", devices="cpu", progress=False) as trainer:
        model = trainer.build(lambda: nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))))
        optimizer = trainer.prepare(torch.optim.SGD(model.parameters(), lr=1e-3))
        session = trainer.session
        checkpointer = checkpointer_of(session, folder / "tp")
        checkpointer.open()
        steps = iter(range(1, 100))

        def save() -> None:
            tensors = collect_state(model, optimizer, cut=session.as_slice)
            checkpointer.save(next(steps), tensors, {}, {}, {"metrics": {}})
            checkpointer.finish()

        def torch_save() -> None:
            number = next(steps)
            dcp.save({"model": model.state_dict()}, checkpoint_id=folder / "dcp" / f"step-{number}")
            for old in [place for place in places("dcp") if place.name != f"step-{number}"]:
                if session.is_main:
                    shutil.rmtree(old)

        def torch_load() -> None:
            state = {"model": model.state_dict()}
            dcp.load(state, checkpoint_id=places("dcp")[-1])
            model.load_state_dict(state["model"])

        def load() -> None:
            trainer.load_model(model, places("tp")[-1])

        def places(kind: str) -> list[Path]:
            return sorted((folder / kind).glob("step-*"))

        ways = {f"save, {TORCH}": torch_save, f"save, {TP}": save}
        ways |= {f"load, {TORCH}": torch_load, f"load, {TP}": load}
        found: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(ROUNDS):
            for name, way in ways.items():
                if name.startswith("load") and session.is_main:
                    forget(folder)
                found[name].append(timed(way))
        checkpointer.close()
        return sum(p.numel() * p.element_size() for p in model.parameters()), found


if __name__ == "__main__":
    with Results("trainer-sharded-state") as results, tempfile.TemporaryDirectory() as place:
        (nbytes, times), _ = run_ranks(times_of_rank, 2, Path(place), timeout_s=900.0)
        results.add("the size of the state", nbytes / 1e6, "MB")
        for what in ("save", "load"):
            base = times[f"{what}, {TORCH}"][1:]  # the first one finds no old file and fresh memory
            for name in (TORCH, TP):
                warm = times[f"{what}, {name}"][1:]
                results.add(f"{what}, {name}", statistics.median(warm), "s")
                ratio = statistics.median(own / other for own, other in zip(warm, base, strict=True))
                results.add(f"{what}, {name}: ratio", ratio, f"x {TORCH}")
