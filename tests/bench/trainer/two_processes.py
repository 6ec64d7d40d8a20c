"""Time per step of the trainer in two gloo processes: python -m tests.bench.trainer.two_processes

Against a hand-written loop over DistributedDataParallel and the peers that are installed, all in
the same two processes. Gloo's waiting varies by some percent: a second hand-written loop shows it.
"""

import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from tp_testing import run_ranks
from tp_trainer import Trainer

from tests.bench._results import Results
from tests.bench.trainer.loops import (
    accelerate_loop,
    fabric_loop,
    hand_written,
    is_installed,
    measure,
    note,
    tp_fit,
    tp_prepare,
)

STEPS, ROUNDS = 50, 120
SLEEPS = 20  # seconds


def times_of_rank() -> dict[str, list[float]]:
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    batches = [(torch.randn(8, 16), torch.randn(8, 1)) for _ in range(STEPS)]
    trainer = Trainer(devices="cpu")
    ways = {
        "hand-written": hand_written(batches, wrap=DistributedDataParallel),
        "hand-written, again": hand_written(batches, wrap=DistributedDataParallel),
        "tp prepare": tp_prepare(trainer, batches),
        "tp fit": tp_fit(trainer, batches, STEPS),
    }
    if is_installed("accelerate"):
        ways["accelerate"] = accelerate_loop(batches)
    if is_installed("lightning_fabric"):
        ways["fabric"] = fabric_loop(batches, devices=2)
    return measure(ways, rounds=ROUNDS)


def share_of_asking() -> float:
    """Return what the thread takes of a core that looks five times a second whether a rank asks.

    By the processor's time, and beside a main thread that sleeps: a percent of a step's wall time is less
    than what two loops of one kind differ by.
    """
    with Trainer(devices="cpu", progress=False) as trainer:
        began = time.process_time()
        for _ in range(SLEEPS):
            time.sleep(1)
        asleep = time.process_time() - began
        with trainer.loop(trainer.prepare(range(SLEEPS), shard=False)) as loop:
            began = time.process_time()
            for _ in loop:
                time.sleep(1)
                looked = time.process_time() - began
        return (looked - asleep) / SLEEPS


if __name__ == "__main__":
    with Results("trainer-two-processes") as found:
        times, _ = run_ranks(times_of_rank, 2, timeout_s=300.0)
        note(found, "batches from a list", times)
        for rank, share in enumerate(run_ranks(share_of_asking, 2, timeout_s=300.0)):
            found.add(f"looks whether a rank asks for something, rank {rank}: share of a core", share, "")
