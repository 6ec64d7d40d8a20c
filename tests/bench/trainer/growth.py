"""How costs grow with the ranks of a job: python -m tests.bench.trainer.growth [real | simulated]

``real``: processes of this machine. The launcher starts 2 to 16 ranks, which agree on their settings and
open a session; beside the machine's cores, more ranks take turns, so only what grows faster than they do
says something. ``simulated``: rank 0 of up to 4,096 alone, with a store in memory in which the others
have answered already, and the order of a batch for so many. So waits and links are missing, and the work is
there.
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
from torch.utils.data import BatchSampler, DataLoader, RandomSampler
from tp_core import LaunchEnvironment
from tp_core.data._batches import EpochBatches
from tp_trainer import Trainer, launch
from tp_trainer._opening import _agreement

from tests.bench._results import Results
from tests.bench.trainer.memory import Samples

REAL, SIMULATED, REPEATS = (2, 4, 8, 16), (16, 64, 256, 1024, 4096), 3
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
        loader = DataLoader(Samples(lambda i: torch.zeros(64), 64 * 20), batch_size=64)
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


def real(results: Results) -> None:
    for ranks in REAL:
        with TemporaryDirectory() as folder:
            began = perf_counter()
            found = launch(of_a_rank, ranks, folder)
            results.add(f"launch to end, {ranks} ranks", perf_counter() - began, "s")
        for name in found[0]:
            results.add(f"{name}, {ranks} ranks", 1e3 * max(own[name] for own in found), "ms")


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
    for name, measure in (("real", real), ("simulated", simulated)):
        if not wanted or name in wanted:
            with Results(f"trainer-growth-{name}") as results:
                measure(results)


if __name__ == "__main__":
    main(sys.argv[1:])
