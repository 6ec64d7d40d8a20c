"""Memory and seconds to resume over many samples: python -m tests.bench.data.scale [ROWS]

A file of ten million short lines of JSON is indexed once. Then two workers load a part of an epoch, shuffled,
and their memory is looked at on the way: what belongs to each alone, without pages of the file that the
system keeps for all. A loader at 90 % of the epoch begins anew.
"""

import sys
import tempfile
import time
from itertools import islice
from pathlib import Path

import psutil
from tp_data import BatchSize, JsonLines, Loader, Stream

from tests.bench._results import Results

ROWS = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000_000
BATCH, BATCHES = 256, 2_000


def write(path):
    with path.open("w") as file:
        for first in range(0, ROWS, 100_000):
            file.writelines(f'{{"id": {i}}}\n' for i in range(first, min(first + 100_000, ROWS)))


def own_mib():
    """Return the memory of each worker that no other process has, in MiB: the largest."""
    workers = psutil.Process().children()
    return max(worker.memory_full_info().uss for worker in workers) / 2**20


def main():
    with (
        tempfile.TemporaryDirectory() as folder,
        Results("data_scale", is_part=ROWS != 10_000_000) as results,
    ):
        path = Path(folder) / "rows.jsonl"
        write(path)
        begin = time.perf_counter()
        source = JsonLines(path)
        results.add("to make the index", time.perf_counter() - begin, "s")
        begin = time.perf_counter()
        source = JsonLines(path)
        results.add("to find the index", time.perf_counter() - begin, "s")
        loader = Loader(Stream(source, shuffle=True), BatchSize(BATCH, collate=list), workers=2)
        batches = iter(loader)
        for part in range(5):
            for _ in islice(batches, BATCHES // 5 if part else 20):
                pass
            results.add(f"memory of a worker's own, after {loader.stats.rows} samples", own_mib(), "MiB")
        del batches
        position = ROWS * 9 // 10 // BATCH * BATCH
        loader.set_epoch(0)
        state = loader.state_dict() | {"position": position, "batch": position // BATCH}
        begin = time.perf_counter()
        again = Loader(Stream(JsonLines(path), shuffle=True), BatchSize(BATCH, collate=list))
        again.load_state_dict(state)
        next(iter(again))
        results.add("to resume at 90 %, with a new stream", time.perf_counter() - begin, "s")


if __name__ == "__main__":
    main()
