"""How costs grow with the ranks of a job: python -m tests.bench.trainer.growth [real [RANKS ...] | simulated]

``real``: processes of this machine. The launcher starts 2 to 64 ranks, or as many as are named, which agree
on their settings and train a tiny model. Beyond the machine's cores, ranks take turns: so each cost is given
for each rank, too, and only what grows there grows faster than the ranks. ``simulated``: rank 0 of up to
4,096 alone, with a store in memory in which the others have answered already, and the order of a batch for
so many. So waits and links are missing, and the work is there.
"""

import json
import sys
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from unittest.mock import patch

import torch
from torch import nn
from torch.distributed import HashStore
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset
from tp_core import LaunchEnvironment
from tp_core.data._batches import EpochBatches
from tp_launch import launch
from tp_trainer import Trainer
from tp_trainer._opening import _agreement

from tests.bench._results import Results

REAL, SIMULATED, REPEATS = (2, 4, 8, 16, 32, 64), (16, 64, 256, 1024, 4096), 3
FACTS = {"backend": "'ddp' of tp-trainer", "seed": 0, "precision": "fp32", "accumulate": 1, "options": {}}


def of_a_rank(folder: str) -> dict[str, float]:
    """Return the seconds of agreement and session, of a loader's batch, and of a checkpoint."""
    torch.set_num_threads(1)
    environment = LaunchEnvironment.read()
    found: dict[str, float] = {}
    began = perf_counter()
    _agreement.agree_at_start(environment, FACTS, message=None, decide=len)
    found["agreement"] = perf_counter() - began
    with Trainer(backend="ddp", devices="cpu", seed=0, progress=False) as trainer:
        model = nn.Linear(64, 64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(TensorDataset(torch.zeros(64 * 20, 64)), batch_size=64)
        made, using, batches = trainer.prepare(model, optimizer, loader)
        began = perf_counter()
        for _ in batches:
            pass
        found["a batch"] = (perf_counter() - began) / 20
        state = {"model": made, "optimizer": using}
        with trainer.loop(batches, epochs=1, state=state, checkpoint=folder) as loop:
            for _ in loop:
                began = perf_counter()
            loop_ended = perf_counter()
        found["checkpoint"] = perf_counter() - loop_ended
    return found


def real(results: Results, counts: tuple[int, ...]) -> None:
    for ranks in counts:
        with TemporaryDirectory() as folder:
            began = perf_counter()
            found = launch(of_a_rank, ranks, folder)
            seconds = {"launch to end": perf_counter() - began}
        seconds |= {name: max(own[name] for own in found) for name in found[0]}
        for name, each in seconds.items():
            results.add(f"{name}, {ranks} ranks", 1e3 * each, "ms")
            results.add(f"{name}, {ranks} ranks: for each rank", 1e3 * each / ranks, "ms")


def agree(ranks: int) -> float:
    """Return the seconds in which rank 0 reads the answers of all others, and decides."""
    store = HashStore()
    answer = json.dumps({"facts": FACTS, "message": None}, sort_keys=True)
    for rank in range(ranks):
        store.set(f"tp/handshake/0/facts/{rank}", answer)
    environment = LaunchEnvironment(world_size=ranks, local_world_size=8)
    with patch.object(_agreement, "rendezvous_store", lambda *_, **__: store):
        began = perf_counter()
        _agreement.agree_at_start(environment, FACTS, message=None, decide=len)
        return perf_counter() - began


def batch_of(ranks: int) -> float:
    """Return the seconds in which the last rank finds its samples of a batch with eight for each rank."""
    inner = BatchSampler(RandomSampler(range(8 * ranks * 20)), 8 * ranks, drop_last=True)
    batches = EpochBatches(inner, seed=0, rank=ranks - 1, size=ranks, training=True)
    batches.start(0)
    began = perf_counter()
    count = sum(1 for _ in batches)
    return (perf_counter() - began) / count


def simulated(results: Results) -> None:
    for name, measure in (("agreement on rank 0", agree), ("order of a batch", batch_of)):
        for ranks in SIMULATED:
            seconds = median(measure(ranks) for _ in range(REPEATS))
            results.add(f"{name}, {ranks} ranks", 1e3 * seconds, "ms")


def main(wanted: list[str]) -> None:
    counts = tuple(int(word) for word in wanted if word.isdecimal())
    if not wanted or "real" in wanted:
        with Results("trainer-growth-real", is_part=bool(counts)) as results:
            real(results, counts or REAL)
    if not wanted or "simulated" in wanted:
        with Results("trainer-growth-simulated") as results:
            simulated(results)


if __name__ == "__main__":
    main(sys.argv[1:])
