"""Samples per second, and seconds to resume, beside other loaders: python -m tests.bench.data.loaders [ROWS]

All read the same samples, shuffled, in this process and with two workers, by turns: lines of JSON and tar
shards as they are, and MosaicML's shards written from them. Peers that are not installed are left out. What
is asked of each is batches of dicts; nothing is tokenized or made a tensor, which would hide the loader.
"""

import gc
import importlib.util
import io
import json
import random
import statistics
import sys
import tarfile
import tempfile
import time
from itertools import islice
from pathlib import Path

from torch.utils.data import DataLoader, Dataset
from tp_data import BatchSize, JsonLines, Loader, Shuffle, Stream, TarShards

from tests.bench._results import Results

ROWS = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
BATCH, ROUNDS, SHARD = 64, 3, 5_000


def write(folder):
    """Write the samples as lines of JSON, tar shards, and shards of MosaicML's if it is there."""
    choose = random.Random(0)
    rows = [{"id": i, "text": "word " * choose.randint(1, 60)} for i in range(ROWS)]
    with (folder / "rows.jsonl").open("w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    for first in range(0, ROWS, SHARD):
        with tarfile.open(folder / f"{first // SHARD:05}.tar", "w") as tar:
            for row in rows[first : first + SHARD]:
                content = json.dumps(row).encode()
                info = tarfile.TarInfo(f"{row['id']:08}.json")
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    if importlib.util.find_spec("streaming"):
        from streaming import MDSWriter

        with MDSWriter(out=str(folder / "mds"), columns={"id": "int", "text": "str"}) as out:
            for row in rows:
                out.write(row)


def words_of(row):
    """Return a row with its number of words: a transform that draws no random numbers."""
    return {**row, "words": len(row["text"].split())}


class Lines(Dataset):
    """What a map-style dataset by hand is: the offsets of lines in memory."""

    def __init__(self, path, transform=None):
        self.path, self.transform = path, transform
        self.file, self.starts = None, [0]
        with path.open("rb") as file:
            for line in file:
                self.starts.append(self.starts[-1] + len(line))

    def __len__(self):
        return len(self.starts) - 1

    def __getitem__(self, index):
        self.file = self.file or self.path.open("rb")
        self.file.seek(self.starts[index])
        row = json.loads(self.file.readline())
        return row if self.transform is None else self.transform(row)


def loaders(folder, workers):
    """Return functions that make each loader, by name."""

    def ours(source, shuffle=True, transform=None):
        return lambda: Loader(
            Stream(source, shuffle=shuffle, transform=transform),
            BatchSize(BATCH, collate=list),
            workers=workers,
        )

    options = {"batch_size": BATCH, "num_workers": workers, "collate_fn": list}
    lines = JsonLines(folder / "rows.jsonl")
    blocks = Shuffle(blocks=1000, buffer=10_000)
    found = {
        "tp-data, lines of JSON": ours(lines),
        "tp-data, lines of JSON in blocks": ours(lines, blocks),
        "tp-data, lines of JSON, transform": ours(lines, transform=words_of),
        "tp-data, tar shards": ours(TarShards(sorted(folder.glob("*.tar")))),
        "DataLoader, lines of JSON by hand": lambda: DataLoader(
            Lines(folder / "rows.jsonl"), shuffle=True, **options
        ),
        "DataLoader, lines of JSON by hand, transform": lambda: DataLoader(
            Lines(folder / "rows.jsonl", words_of), shuffle=True, **options
        ),
    }
    if importlib.util.find_spec("torchdata"):
        from torchdata.stateful_dataloader import StatefulDataLoader

        by_hand = Lines(folder / "rows.jsonl")
        found["torchdata, lines of JSON by hand"] = lambda: StatefulDataLoader(
            by_hand, shuffle=True, **options
        )
    if importlib.util.find_spec("datasets"):
        import datasets

        datasets.disable_progress_bars()
        made = datasets.Dataset.from_json(str(folder / "rows.jsonl"), cache_dir=str(folder / "hf"))
        found["tp-data, datasets as Arrow"] = ours(made)
        found["datasets, as Arrow"] = lambda: DataLoader(made, shuffle=True, **options)
        streamed = made.to_iterable_dataset(num_shards=8).shuffle(seed=0, buffer_size=10_000)
        found["datasets, streamed"] = lambda: DataLoader(streamed, **options)
    if importlib.util.find_spec("webdataset"):
        import webdataset

        def web():
            urls = [str(path) for path in sorted(folder.glob("*.tar"))]
            shards = webdataset.WebDataset(
                urls, shardshuffle=len(urls), workersplitter=webdataset.split_by_worker
            )
            return DataLoader(shards.shuffle(10_000).decode(), **options)

        found["WebDataset, tar shards"] = web
    if importlib.util.find_spec("streaming"):
        import streaming

        def mosaic():
            made = streaming.StreamingDataset(local=str(folder / "mds"), shuffle=True, batch_size=BATCH)
            return streaming.StreamingDataLoader(made, **options)

        found["tp-data, MDS"] = ours(streaming.LocalDataset(str(folder / "mds")))
        found["MosaicML streaming, MDS"] = mosaic
    return found


def speed(make):
    """Return samples per second over half of an epoch, without the first batch."""
    batches = iter(make())
    next(batches)
    begin, seen = time.perf_counter(), 0
    for batch in islice(batches, ROWS // BATCH // 2):
        seen += len(batch)
    return seen / (time.perf_counter() - begin)


def resume(make):
    """Return the seconds from a new loader to its first batch at 90 % of an epoch, if it can."""
    loader = make()
    if not hasattr(loader, "load_state_dict"):
        return None
    if isinstance(loader, Loader):
        position = ROWS * 9 // 10 // BATCH * BATCH
        loader.set_epoch(0)
        state = loader.state_dict() | {"position": position, "batch": position // BATCH}
    else:
        for _ in zip(range(ROWS * 9 // 10 // BATCH), batches := iter(loader), strict=False):
            pass
        state = loader.state_dict()
        del batches
    gc.collect()
    begin = time.perf_counter()
    again = make()
    again.load_state_dict(state)
    next(iter(again))
    return time.perf_counter() - begin


def main():
    with (
        tempfile.TemporaryDirectory() as temporary,
        Results("data_loaders", is_part=ROWS != 100_000) as results,
    ):
        folder = Path(temporary)
        write(folder)
        for workers in (0, 2):
            made = loaders(folder, workers)
            speeds = {name: [] for name in made}
            for _ in range(ROUNDS):  # by turns: other programs of the machine slow all of them
                for name, make in made.items():
                    speeds[name].append(speed(make))
            for name, values in speeds.items():
                results.add(f"{name}, {workers} workers", statistics.median(values), "samples/s")
            if not workers:
                for name, make in made.items():
                    if (seconds := resume(make)) is not None:
                        results.add(f"{name}, to resume at 90 %", seconds, "s")


if __name__ == "__main__":
    main()
