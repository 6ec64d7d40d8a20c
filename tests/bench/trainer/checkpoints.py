"""What checkpoints cost, and what they save: python -m tests.bench.trainer.checkpoints

Steps with a checkpoint every 1000 of them against a bare hand-written loop; how long a save of 500
MB keeps the training from going on, against torch.save; how long it takes to go on at 90 % of an
epoch of a million samples, against reading what is before it; checkpoints of adapters against peft's own
files; and the memory of it all. The name of one of these measures it alone.
"""

import contextlib
import io
import itertools
import multiprocessing
import os
import resource
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.utils.data import DataLoader, Dataset
from tp_core.state import collect_state
from tp_trainer import Checkpoints, Trainer
from tp_trainer._checkpoint._checkpointer import Checkpointer  # private: a save without a run around it

from tests.bench._results import Results
from tests.bench.trainer.loops import hand_written, is_installed, make, measure, note, step

EVERY, MILLION = 1000, 1_000_000
WIDTH, LAYERS = 2048, 30  # of 16 MiB each: 500 MB
COLD = 3
"""So many rounds of saves go uncounted: those who leave the old file in place until the new one is there need
memory of the system that a virtual machine may not have touched before, and its first use takes a second."""


def checkpointer_of(session: Any, folder: Path, **settings: Any) -> Any:
    """Return what saves without a run around it."""
    return Checkpointer(Checkpoints(folder, keep=1, **settings), session)


def steps(folder: Path, results: Results) -> None:
    """A tiny MLP, 1000 steps a round and one checkpoint in them."""
    trainer = Trainer(devices="cpu")
    batches = [(torch.randn(8, 16), torch.randn(8, 1)) for _ in range(EVERY)]

    def fit(place: str | None = None, **options) -> Callable[[], float]:
        model, optimizer = make()
        numbers = itertools.count()

        def way() -> float:
            arguments = {}
            if place is not None:  # each fit is a run of its own
                new = folder / place / str(next(numbers))
                arguments["checkpoint"] = Checkpoints(new, every_steps=EVERY, every_epochs=None, **options)
            with contextlib.redirect_stderr(io.StringIO()):  # its progress is on, as by default
                began = time.perf_counter()
                trainer.fit(model, optimizer, batches, step=step, **arguments)
                return (time.perf_counter() - began) / EVERY

        return way

    ways = {
        "hand-written, no checkpoint": hand_written(batches),
        "tp fit, no checkpoint": fit(),
        "tp fit, a checkpoint every 1000 steps": fit("here"),
        "the same, asynchronous": fit("there", background=True),
    }
    note(results, "steps", measure(ways, rounds=15))


def saves(folder: Path, results: Results) -> None:
    """How long training waits for a save of 500 MB, and how long until it is on the disk."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    state = {"model": model.state_dict()}

    def torch_save() -> tuple[float, float]:
        began = time.perf_counter()
        with (folder / "model.pt").open("wb") as file:
            torch.save(state, file)
        seconds = time.perf_counter() - began
        return seconds, seconds

    def torch_save_beside() -> tuple[float, float]:
        # As tp does: pages and blocks that no file held yet cost some machines more than the writing.
        began = time.perf_counter()
        with (folder / "part.pt").open("wb") as file:
            torch.save(state, file)
            os.fsync(file.fileno())
        (folder / "part.pt").replace(folder / "whole.pt")
        seconds = time.perf_counter() - began
        return seconds, seconds

    def torch_save_on_disk() -> tuple[float, float]:
        began = time.perf_counter()
        with (folder / "synced.pt").open("wb") as file:
            torch.save(state, file)
            os.fsync(file.fileno())
        seconds = time.perf_counter() - began
        return seconds, seconds

    def torch_async() -> tuple[float, float]:
        began = time.perf_counter()
        writing = dcp.async_save(state, checkpoint_id=folder / "dcp", no_dist=True)
        blocked = time.perf_counter() - began
        writing.result()
        return blocked, time.perf_counter() - began

    def tp(asynchronous: bool) -> Callable[[], tuple[float, float]]:
        place = folder / str(asynchronous)
        trainer = Trainer(devices="cpu", progress=False)
        prepared = trainer.prepare(model)
        checkpointer = checkpointer_of(trainer.session, place, background=asynchronous)
        count = 0

        def way() -> tuple[float, float]:
            nonlocal count
            count += 1
            began = time.perf_counter()
            session = trainer.session
            tensors = collect_state(session.unwrap(prepared), optimizer, cut=session.as_slice)
            checkpointer.save(count, tensors, {}, {}, {"metrics": {}})
            blocked = time.perf_counter() - began
            checkpointer.finish()
            return blocked, time.perf_counter() - began

        return way

    ways = {
        "torch.save": torch_save,
        "torch.save and fsync, a new file that replaces the old": torch_save_beside,
        "torch.save and fsync": torch_save_on_disk,
        "torch.distributed.checkpoint.async_save": torch_async,
        "tp, checked and brought onto the disk": tp(asynchronous=False),
        "tp, asynchronous": tp(asynchronous=True),
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(COLD + 5):
        for name, way in ways.items():
            os.sync()  # what another one has left in memory is not for this one to bring onto the disk
            times[name].append(way())
    nbytes = sum(p.numel() * p.element_size() for p in model.parameters())
    results.add("the size of a save", nbytes / 1e6, "MB")
    base = [blocked for blocked, _ in times["torch.save"][COLD:]]
    for name, found in times.items():
        warm = found[COLD:]
        ratio = statistics.median(b / t for (b, _), t in zip(warm, base, strict=True))
        blocked, done = (statistics.median(column) for column in zip(*warm, strict=True))
        results.add(f"{name}: blocked", blocked, "s")
        results.add(f"{name}: blocked, ratio", ratio, "x torch.save")
        results.add(f"{name}: done", done, "s")


def adapters(folder: Path, results: Results) -> None:
    """A Llama of 100 million parameters with LoRA: the trained part alone, against peft's own files."""
    import peft
    import transformers
    from tp_trainer._checkpoint._base import FrozenWeights  # private: without the steps of a run

    sizes = {
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
    }
    base = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(vocab_size=16_000, use_cache=False, **sizes)
    )
    lora = peft.LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(base, lora)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    model(
        input_ids=torch.zeros(1, 8, dtype=torch.int64), labels=torch.zeros(1, 8, dtype=torch.int64)
    ).loss.backward()
    optimizer.step()
    trainer = Trainer(devices="cpu", progress=False)
    session = trainer.prepare(model) and trainer.session
    checkpointer = checkpointer_of(session, folder / "tp")
    began = time.perf_counter()
    frozen = FrozenWeights(session, model, None)
    results.add("digests of the base", time.perf_counter() - began, "s")
    results.add("parameters", sum(p.numel() for p in model.parameters()) / 1e6, "million")
    count = 0

    def tp(weights: str) -> None:
        nonlocal count
        count += 1
        left_out = frozen.base(model) if weights == "trainable" else None
        without = () if left_out is None else left_out.weights
        tensors = collect_state(model, optimizer, cut=session.as_slice, without=without)
        values = {} if left_out is None else {"base": left_out.to_plain()}
        checkpointer.save(count, tensors, values, {}, {"metrics": {}})
        checkpointer.finish()

    def peft_saves() -> None:
        model.save_pretrained(folder / "peft")
        with (folder / "peft" / "optimizer.pt").open("wb") as file:
            torch.save(optimizer.state_dict(), file)
            os.fsync(file.fileno())

    ways = {
        "peft, save_pretrained() and the optimizer": (peft_saves, "peft"),
        "tp, weights='trainable'": (lambda: tp("trainable"), "tp"),
        "tp, weights='all'": (lambda: tp("all"), "tp"),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    nbytes = {}
    for _ in range(COLD + 5):
        for name, (way, place) in ways.items():
            os.sync()
            began = time.perf_counter()
            way()
            times[name].append(time.perf_counter() - began)
            nbytes[name] = sum(file.stat().st_size for file in (folder / place).rglob("*") if file.is_file())
    first = next(iter(ways))
    for name, found in times.items():
        results.add(f"{name}: size", nbytes[name] / 1e6, "MB")
        results.add(f"{name}: size, ratio", nbytes[name] / nbytes[first], "x peft")
        results.add(f"{name}: seconds", statistics.median(found[COLD:]), "s")


class Numbers(Dataset):
    """A million samples that cost next to nothing each."""

    def __len__(self) -> int:
        return MILLION

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full((16,), index / MILLION), torch.ones(1)


class ReachedError(Exception):
    """The first step of a resumed run."""


def resume(folder: Path, results: Results) -> None:
    """From the start of fit to the first step, at 90 % of an epoch."""
    loader = DataLoader(Numbers(), batch_size=1000, shuffle=True)
    stop = len(loader) * 9 // 10
    done = 0

    def stop_at(model, batch):
        nonlocal done
        done += 1
        if done > stop:
            raise ReachedError
        return step(model, batch)

    def reached(model, batch):
        raise ReachedError

    def fit(run, **arguments) -> float:
        began = time.perf_counter()
        with contextlib.suppress(ReachedError), Trainer(devices="cpu", progress=False, seed=0) as trainer:
            model, optimizer = make()
            trainer.fit(model, optimizer, loader, step=run, checkpoint=rules, **arguments)
        return time.perf_counter() - began

    rules = Checkpoints(folder / "run", every_steps=stop)
    results.add("training up to 90 % of an epoch", fit(stop_at), "s")
    began = time.perf_counter()
    for number, _ in enumerate(loader):
        if number == stop:
            break
    results.add("reading what is before it again", time.perf_counter() - began, "s")
    if is_installed("accelerate"):
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True)
        prepared = accelerator.prepare_data_loader(DataLoader(Numbers(), batch_size=1000, shuffle=True))
        began = time.perf_counter()
        next(iter(accelerator.skip_first_batches(prepared, stop)))
        results.add("Accelerate, skip_first_batches", time.perf_counter() - began, "s")
    results.add("tp, resume='auto', from fit() to the first step", fit(reached, resume="auto"), "s")


def memory(folder: Path, results: Results) -> None:
    """The highest resident memory of a process that trains 500 MB with Adam's 1000 beside it."""
    context = multiprocessing.get_context("spawn")
    base = None
    for name in ("hand-written", "tp fit", "tp fit, checkpoint", "tp fit, asynchronous checkpoint"):
        reader, writer = context.Pipe(duplex=False)
        process = context.Process(target=_train_large, args=(name, str(folder / name), writer))
        process.start()
        peak = reader.recv()
        process.join()
        base = peak if base is None else base
        results.add(f"{name}: peak", peak, "MiB")
        results.add(f"{name}: beyond the bare loop", peak - base, "MiB")


def _train_large(name: str, folder: str, writer) -> None:
    torch.set_num_threads(2)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    batches = [(torch.randn(4, WIDTH), torch.randn(4, WIDTH))] * 3
    if name == "hand-written":
        for batch in batches:
            optimizer.zero_grad()
            step(model, batch).backward()
            optimizer.step()
    else:
        kinds = {"tp fit": None, "tp fit, checkpoint": Checkpoints(folder, every_steps=2)}
        last = Checkpoints(folder, every_steps=2, background=True)
        trainer = Trainer(devices="cpu", progress=False)
        trainer.fit(model, optimizer, batches, step=step, checkpoint=kinds.get(name, last))
    writer.send(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


def main() -> None:
    parts = {"steps": steps, "saves": saves, "adapters": adapters, "resume": resume, "memory": memory}
    torch.manual_seed(0)
    for name, part in parts.items():
        if sys.argv[1:] in ([], [name]):
            torch.set_num_threads(1 if part in (steps, resume) else 2)
            folder = Path(tempfile.mkdtemp(prefix="tp-bench-"))
            try:
                with Results(f"checkpoints-{name}") as results:
                    part(folder, results)
            finally:
                shutil.rmtree(folder)


if __name__ == "__main__":
    main()
