"""What type checkers see: objects stay what they were, and steps and work are typed as users do."""

import subprocess
import sys

import pytest

PROGRAM = """
from typing import assert_type

from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import DataLoader
from tp_launch import launch
from tp_trainer import History, Step, Trainer

class Net(nn.Module):
    def encode(self, x: Tensor) -> Tensor:
        return x

def step(model: Net, batch: tuple[Tensor, Tensor]) -> Tensor:
    return model.encode(batch[0]).sum()

def named(model: Net, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    return {"loss": step(model, batch)}

def train(loader: DataLoader[tuple[Tensor, Tensor]], net: Net, optimizer: SGD) -> None:
    trainer = Trainer()
    prepared = trainer.prepare(net, optimizer, loader)
    assert_type(prepared, tuple[Net, SGD, DataLoader[tuple[Tensor, Tensor]]])
    assert_type(trainer.prepare(net), Net)
    assert_type(trainer.fit(net, optimizer, loader, step=step), History)
    trainer.fit(net, optimizer, loader, step=named, validation={"a": loader})
    trainer.evaluate(net, loader, step=named)
    one: Step = step

def work(x: int, *, y: int) -> str:
    return str(x + y)

assert_type(launch(work, 2, 1, y=2), list[str])
launch(work, 2, "no", y=2)  # type: ignore[arg-type]
"""

RUNNER = """
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, assert_type

import tp_runner
from torch.utils.data import Dataset
from tp_runner import Executor, OrderedRunner, ResultStream, WorkerError

def half(x: int) -> float:
    return x / 2

def load(device: str) -> str:
    return device

def count(model: str, x: int) -> int:
    return len(model) + x

class Halves(OrderedRunner[float]):
    @staticmethod
    def producer_work(device: str, cfg: Any, data: int) -> float:
        return half(data)

class Unnamed(OrderedRunner):
    pass

assert_type(list(Halves().stream([1])), list[float])
assert_type(Halves().submit(1), Future[float])
assert_type(Unnamed().submit(1), Future[Any])
Halves().submit(1).result().no  # type: ignore[attr-defined]

def check(executor: Executor, other: ThreadPoolExecutor, data: Dataset[int]) -> None:
    assert_type(executor.submit(half, 1), Future[float])
    assert_type(other.submit(half, 1), Future[float])
    assert_type(executor.map(half, [1, 2]), Iterator[float])
    assert_type(other.map(half, [1, 2]), Iterator[float])
    executor.submit(half, "no")  # type: ignore[arg-type]
    other.submit(half, "no")  # type: ignore[arg-type]
    executor.submit(half, 1, 2)  # type: ignore[call-arg]
    other.submit(half, 1, 2)  # type: ignore[call-arg]
    executor.submit(half, 1).result().no  # type: ignore[attr-defined]
    other.submit(half, 1).result().no  # type: ignore[attr-defined]
    assert_type(tp_runner.map(half, [1, 2], n_workers=2), ResultStream[float])
    assert_type(next(tp_runner.map(half, [1, 2])), float)
    assert_type(tp_runner.map(count, [1, 2], init=load), ResultStream[int])
    tp_runner.map(half, ["no"])  # type: ignore[arg-type]
    tp_runner.map(half, [1], n_worker=2)  # type: ignore[call-overload]
    tp_runner.map(half, [1]).no  # type: ignore[attr-defined]
    for result in tp_runner.map(half, [1], on_error="return"):
        if isinstance(result, WorkerError):
            print(result.index)
    with tp_runner.map(half, [1]) as results:
        assert_type(list(results), list[float])
"""


@pytest.mark.slow
def test_type_checkers_see_what_users_have_and_what_is_wrong(tmp_path):
    pytest.importorskip("mypy")
    files = [tmp_path / "train.py", tmp_path / "work.py"]  # at once: most of the time goes into reading torch
    for file, program in zip(files, (PROGRAM, RUNNER), strict=True):
        file.write_text(program)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--cache-dir", tmp_path / "cache", *files],
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
