"""Sharded training in two gloo processes: python -m tests.bench.trainer.fsdp

A transformer of eight blocks: time per step and memory of the backend ``fsdp`` against the same written by
hand over ``fully_shard``, beside ``ddp`` and the peers that are installed, all in the same two processes; and
with LoRA, where everything else is frozen. The memory of each is measured in processes of its own: the most
that was resident beyond what was before it.
"""

import contextlib
import importlib
import io
import os
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from tp_testing import run_ranks
from tp_trainer import FsdpOptions, Trainer

from tests.bench._results import Results
from tests.bench.trainer.loops import Way, is_installed, measure, note

STEPS, ROUNDS, MEMORY_STEPS = 4, 15, 3
Size = tuple[int, int, bool]  # width, blocks, and whether adapters alone are trained
SMALL, LARGE = (128, 8, False), (640, 8, False)  # for times, and for memory
SMALL_LORA, LARGE_LORA = (128, 8, True), (640, 8, True)


class Model(nn.Module):
    """(batch, sequence, width) -> (batch, sequence, width)."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
            for _ in range(blocks)
        )
        self.head = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return what the head makes of the last block's output."""
        for block in self.blocks:
            x = block(x)
        output: Tensor = self.head(x)
        return output


def step(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def make(size: Size) -> nn.Module:
    torch.manual_seed(0)
    width, blocks, is_adapted = size
    if not is_adapted:
        return Model(width, blocks)
    from peft import LoraConfig, get_peft_model

    return get_peft_model(Model(width, blocks), LoraConfig(r=8, target_modules=["linear1", "linear2"]))


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)


def loop(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable, backward: Callable) -> float:
    began, steps = time.perf_counter(), 0
    for batch in batches:
        optimizer.zero_grad()
        backward(step(model, batch))
        optimizer.step()
        steps += 1
    return (time.perf_counter() - began) / steps


def by_hand(batches: list, size: Size) -> Way:
    model = make(size)
    for block in model.modules():
        if isinstance(block, nn.TransformerEncoderLayer):
            fully_shard(block)
    fully_shard(model)
    optimizer = adam(model)
    return lambda: loop(model, optimizer, batches, Tensor.backward)


def tp(backend: str, batches: list, size: Size, *, options: FsdpOptions | None = None) -> Way:
    trainer = Trainer(backend=backend, devices="cpu", options=options)
    model = make(size)
    model, optimizer, loader = trainer.prepare(model, adam(model), batches, shard=False)

    def way() -> float:
        with contextlib.redirect_stderr(io.StringIO()):  # its progress is on, as by default
            history = trainer.fit(model, optimizer, loader, step=step)
        return history[0].seconds / len(batches)

    return way


def accelerate(batches: list, size: Size) -> Way:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["TransformerEncoderLayer"],
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    plain = make(size)
    model, optimizer = accelerator.prepare(plain, adam(plain))
    if not isinstance(model, FSDPModule):  # on the CPU it may leave the plugin out
        msg = f"it has made a {type(model).__name__} of the model, which is not sharded"
        raise TypeError(msg)
    return lambda: loop(model, optimizer, batches, accelerator.backward)


def fabric(batches: list, size: Size) -> Way:
    from lightning_fabric import Fabric
    from lightning_fabric.strategies import ModelParallelStrategy

    def shard(model: nn.Module, mesh: object) -> nn.Module:
        for block in model.blocks:
            fully_shard(block, mesh=mesh["data_parallel"])
        return fully_shard(model, mesh=mesh["data_parallel"])

    strategy = ModelParallelStrategy(shard, data_parallel_size=2, tensor_parallel_size=1)
    it = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    it.launch()
    model = it.setup_module(make(size))
    optimizer = it.setup_optimizers(adam(model))
    return lambda: loop(model, optimizer, batches, it.backward)


# What fully_shard does where nothing is said; "auto" keeps parameters after the forward pass where they fit.
AS_BY_HAND = FsdpOptions(reshard_after_forward=True, activation_checkpointing=False, offload=False)
WAYS: dict[str, Callable[[list, Size], Way]] = {
    "hand-written": by_hand,
    "hand-written, again": by_hand,
    "tp fsdp": partial(tp, "fsdp", options=AS_BY_HAND),
    "tp fsdp, auto": partial(tp, "fsdp"),
    "tp ddp": partial(tp, "ddp"),
}
ADAPTED = ("hand-written", "hand-written, again", "tp fsdp")  # what is measured with adapters too


def ways_of(size: Size) -> dict[str, Callable[[list, Size], Way]]:
    return {name: way for name, way in WAYS.items() if not size[2] or name in ADAPTED}


def peers() -> dict[str, Callable[[list, Size], Way]]:
    found = {"accelerate": accelerate, "lightning_fabric": fabric}
    return {name: way for name, way in found.items() if is_installed(name)}


def batches_of(size: Size, count: int) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(dist.get_rank())
    return [(torch.randn(4, 32, size[0]), torch.randn(4, 32, size[0])) for _ in range(count)]


def begin() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")


def times_of_rank(size: Size) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Return the times of each way, and why others do not run here."""
    begin()
    batches = batches_of(size, STEPS)
    ways, left_out = {name: make_way(batches, size) for name, make_way in ways_of(size).items()}, {}
    for name, make_way in peers().items() if not size[2] else ():
        try:
            ways[name] = make_way(batches, size)
            ways[name]()
        except Exception as error:  # noqa: BLE001 - whatever a peer says of a CPU
            left_out[name] = f"{type(error).__name__}: {error}"[:200]
            ways.pop(name, None)
    return measure(ways, rounds=ROUNDS), left_out


def resident(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def memory_of_rank(name: str, size: Size) -> int:
    """Return the most bytes that were resident beyond those before the model was made."""
    begin()
    tiny_size = (8, 1, size[2])
    tiny = WAYS[name](batches_of(tiny_size, 1), tiny_size)
    tiny()  # what is imported and started once is not the model's
    importlib.import_module("tp_trainer._memory")  # about 90 MB of torch's, for large models alone
    batches = batches_of(size, MEMORY_STEPS)
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before = resident("VmRSS")
    WAYS[name](batches, size)()
    return resident("VmHWM") - before


if __name__ == "__main__":
    # What is freed goes back to the system at once, in the ranks too: peaks are of what is held.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = os.environ["MALLOC_TRIM_THRESHOLD_"] = str(2**16)
    with Results("trainer-fsdp") as found:
        parameters = sum(p.numel() * p.element_size() for p in make(LARGE).parameters())
        found.add("memory, parameters", parameters / 1e6, "MB")
        for kind, small, large in (("", SMALL, LARGE), (" with LoRA", SMALL_LORA, LARGE_LORA)):
            (times, left_out), _ = run_ranks(times_of_rank, 2, small, timeout_s=900.0)
            note(found, f"transformer{kind}", times)
            for name, reason in left_out.items():
                print(f"{name} does not run here: {reason}")
            peaks = {
                name: max(run_ranks(memory_of_rank, 2, name, large, timeout_s=900.0))
                for name in ways_of(large)
            }
            for name, peak in peaks.items():
                found.add(f"memory{kind}, {name}: peak", peak / 1e6, "MB")
                found.add(f"memory{kind}, {name}: ratio", peak / peaks["hand-written"], "x hand-written")
