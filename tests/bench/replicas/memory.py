"""Peak memory of training with nested batches and no garbage collector: python -m tests.bench.replicas.memory

Each loop runs in a fresh process, with 40 batches of 40 MB: what a loop keeps of each shows at once.
"""

import gc
import multiprocessing
import os
import resource
import sys
from collections.abc import Callable

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from tp_trainer import Trainer

from tests.bench._results import Results

ROWS, COLUMNS, BATCHES = 40, 262_144, 40  # of float32: 40 MiB


class Rows(Dataset[int]):
    def __len__(self) -> int:
        return ROWS * BATCHES

    def __getitem__(self, i: int) -> int:
        return i


def collate(items: list[int]) -> dict[str, object]:
    return {"x": [torch.ones(len(items), COLUMNS)], "more": ({"y": torch.ones(len(items), 1)},)}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(COLUMNS, 1)

    def forward(self, batch: dict[str, list[torch.Tensor]]) -> torch.Tensor:
        return self.layer(batch["x"][0])


def step(model: nn.Module, batch: dict) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch), batch["more"][0]["y"])


def make() -> tuple[nn.Module, torch.optim.Optimizer, DataLoader]:
    model = Net()
    return model, torch.optim.SGD(model.parameters(), 1e-9), DataLoader(Rows(), ROWS, collate_fn=collate)


def plain() -> None:
    model, optimizer, loader = make()
    for batch in loader:
        optimizer.zero_grad()
        step(model, batch).backward()
        optimizer.step()


def fit(backend: str) -> None:
    model, optimizer, loader = make()
    with Trainer(backend=backend, devices=devices_of(backend), progress=False) as trainer:
        trainer.fit(model, optimizer, loader, step=step, epochs=1)


def own_loop(backend: str) -> None:
    with Trainer(backend=backend, devices=devices_of(backend), progress=False) as trainer:
        model, optimizer, loader = trainer.prepare(*make())
        for batch in loader:
            optimizer.zero_grad()
            trainer.backward(trainer.session.run(step, model, batch))
            optimizer.step()


def devices_of(backend: str) -> list[str]:
    return ["cpu"] * (1 if backend == "single" else 2)


LOOPS: dict[str, tuple[Callable[..., None], tuple[str, ...]]] = {
    "plain loop": (plain, ()),
    **{f"fit, backend {b}": (fit, (b,)) for b in ("single", "tuple", "dp-gather")},
    **{f"own loop, backend {b}": (own_loop, (b,)) for b in ("single", "tuple", "dp-gather")},
}


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 if sys.platform == "darwin" else 2**10)


def measure(name: str, results: "multiprocessing.SimpleQueue[float]") -> None:
    torch.set_num_threads(1)
    loop, args = LOOPS[name]
    gc.disable()
    before = peak_mib()
    loop(*args)
    results.put(peak_mib() - before)


def main() -> None:
    # glibc keeps freed pieces below its threshold, which grows by itself: it would be measured too.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(2**20)
    context = multiprocessing.get_context("spawn")
    base = 0.0
    with Results("replicas-memory") as found:
        for name in LOOPS:
            results = context.SimpleQueue()
            process = context.Process(target=measure, args=(name, results))
            process.start()
            process.join()
            peak = results.get() if process.exitcode == 0 else float("nan")
            base = base or peak
            found.add(f"{name}: peak memory of 40 MB batches", peak, "MiB")
            found.add(f"{name}: ratio", peak / base, "x plain loop")


if __name__ == "__main__":
    main()
