"""Sources on any ranks and workers, changed in the epoch: python -m tests.tp_data.elastic_table [NAME ...]

Each line is a source, or a loader of others. A cell has the number of steps whose ids are those of one rank
without workers, of all steps; the last column changes ranks and workers three times within the epoch. The
exit status is 1 if a step of ours differs anywhere.
"""

import importlib.util
import io
import json
import sys
import tarfile
import tempfile
from itertools import product
from pathlib import Path

from tp_data import (
    Access,
    BatchSize,
    Iterables,
    JsonLines,
    Loader,
    Packed,
    Parquet,
    Shuffle,
    Stream,
    TarShards,
    TextLines,
    TokenBudget,
)

RANKS, WORKERS = (1, 2, 3, 4, 6), (0, 1, 3)
CHANGES = [(2, 0, 3), (3, 1, 4), (6, 0, 2), (4, 3, None)]  # ranks, workers, steps
SAMPLES = 90


def rows():
    return [{"id": i, "input_ids": [i + 1] * (i * 7 % 11 + 1)} for i in range(SAMPLES)]


def tokens():
    return [{"input_ids": row["input_ids"]} for row in rows()]


def lines(folder, name="a.jsonl"):
    for part in range(3):
        text = "".join(json.dumps(row) + "\n" for row in rows()[part::3])
        (folder / f"{part}-{name}").write_text(text)
    return str(folder / f"*-{name}")


def tars(folder):
    with tarfile.open(folder / "a.tar", "w") as tar:
        for row in rows():
            content = json.dumps(row).encode()
            info = tarfile.TarInfo(f"{row['id']:04}.json")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return TarShards(folder / "a.tar")


def parquet(folder):
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(rows()), folder / "a.parquet", row_group_size=20)
    return Parquet(folder / "a.parquet")


def memory(folder):
    import fsspec

    text = "".join(json.dumps(row) + "\n" for row in rows())
    fsspec.filesystem("memory").pipe("/elastic/a.jsonl", text.encode())
    return JsonLines("memory://elastic/a.jsonl", access=Access(cache=folder / "cache"))


def mosaic(folder):
    from streaming import LocalDataset, MDSWriter

    with MDSWriter(
        out=str(folder / "mds"), columns={"id": "int", "input_ids": "json"}, size_limit=500
    ) as out:
        for row in rows():
            out.write(row)
    return LocalDataset(str(folder / "mds"))


def hugging_face(_, *, streams=False):
    import datasets

    made = datasets.Dataset.from_list(rows())
    return made.to_iterable_dataset(num_shards=3) if streams else made


def mixed(folder):
    sources = {"lines": lines(folder), "more": rows()[:40]}
    shares = {0: {"lines": 1.0}, 25: {"lines": 0.6, "more": 0.4}}
    return Stream(sources, mixture=shares, caps={"more": 20}, until="all", shuffle=True, seed=5)


def gzipped(folder):
    import gzip

    (folder / "a.jsonl.gz").write_bytes(gzip.compress("".join(json.dumps(r) + "\n" for r in rows()).encode()))
    return JsonLines(folder / "a.jsonl.gz", access=Access(cache=folder / "cache"))


def text(folder):
    (folder / "a.txt").write_text("".join(f"{i}\n" for i in range(SAMPLES)))
    return TextLines(folder / "a.txt")


SOURCES = {
    "lines of JSON": lines,
    "text": text,
    "gzip": gzipped,
    "Parquet": parquet,
    "tar shards": tars,
    "memory: URL": memory,
    "a list": lambda _: rows(),
    "Hugging Face, map": hugging_face,
    "Hugging Face, stream": lambda folder: hugging_face(folder, streams=True),
    "Iterables": lambda _: Iterables(lambda shard: iter(rows()[shard::4]), 4),
    "MosaicML's shards": mosaic,
    "a mixture that changes": mixed,
    "blocks and a buffer": lambda folder: Stream(lines(folder), shuffle=Shuffle(blocks=7, buffer=20)),
    "TokenBudget": lambda _: tokens(),
    "Packed": lambda _: tokens(),
}
NEEDS = {"Parquet": "pyarrow", "MosaicML's shards": "streaming", "memory: URL": "fsspec"}
NEEDS |= dict.fromkeys(("Hugging Face, map", "Hugging Face, stream"), "datasets")
BATCHERS = {
    "TokenBudget": lambda: TokenBudget(60, window=20, multiple=1),
    "Packed": lambda: Packed(12, 4, window=20),
}


# -- Others, on the same table ---------------------------------------------------------------------
# They need a batch that the number of ranks divides, so theirs is 12; what counts is the set of a step's ids.


class Mosaic:
    """StreamingDataset, by the plan from which each of its ranks and workers takes its samples."""

    def __init__(self, folder):
        from streaming import StreamingDataset

        mosaic(folder)
        options = {"num_canonical_nodes": 1, "shuffle": True, "shuffle_seed": 3, "shuffle_block_size": 1000}
        self.dataset = StreamingDataset(local=str(folder / "mds"), batch_size=12, **options)

    def steps(self, ranks, workers, state=None, number=None):
        from streaming.base.batching import generate_work
        from streaming.base.world import World

        self.dataset.batch_size = 12 // ranks
        world = World(num_nodes=1, ranks_per_node=ranks, workers_per_rank=max(workers, 1), worker=0)
        work = generate_work("random", self.dataset, world, 0, state or 0)[0]
        ordered = work.transpose(2, 1, 0, 3).reshape(-1, 12)  # (steps, samples of all ranks)
        found = [sorted(i for i in step.tolist() if i >= 0) for step in ordered]
        found = [step for step in found if step][:number]
        return found, (state or 0) + sum(map(len, found))


class Torchdata:
    """torchdata's StatefulDataLoader over its own sampler for ranks."""

    def __init__(self, _):
        pass

    def steps(self, ranks, workers, state=None, number=None):
        from torchdata.stateful_dataloader import StatefulDataLoader
        from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

        loaders = []
        for rank in range(ranks):
            sampler = StatefulDistributedSampler(rows(), ranks, rank, shuffle=True, seed=3)
            own = {"batch_size": 12 // ranks, "num_workers": workers, "collate_fn": list}
            loaders.append(StatefulDataLoader(rows(), sampler=sampler, **own))
            if state is not None:
                loaders[-1].load_state_dict(state)
        iterators, found = [iter(one) for one in loaders], []
        while number is None or len(found) < number:
            parts = [next(one, None) for one in iterators]
            if None in parts:
                break
            found.append(sorted(row["id"] for part in parts for row in part))
        return found, loaders[0].state_dict()


PEERS = {"StreamingDataset": Mosaic, "StatefulDataLoader": Torchdata}
NEEDS |= {"StreamingDataset": "streaming", "StatefulDataLoader": "torchdata"}


def is_there(name):
    return name not in NEEDS or importlib.util.find_spec(NEEDS[name]) is not None


def make(name, folder):
    """Return a function of the number of workers that makes the loader."""
    source = SOURCES[name](folder)
    stream = source if isinstance(source, Stream) else Stream(source, shuffle=True, seed=3)
    batcher = BATCHERS.get(name, lambda: BatchSize(7, collate=list))
    return lambda workers: Loader(stream, batcher(), workers=workers)


def ids(batch):
    """Return what says which samples, and which tokens of them, are in the part of a rank."""
    if isinstance(batch, dict):
        return batch["input_ids"].flatten().tolist()
    if isinstance(batch[0], str):
        return batch
    return [row.get("json", row)["id"] for row in batch]


def steps(loader, ranks, state=None, number=None):
    """Return the ids of the steps over all ranks together, and the state behind the last."""
    own = [loader.for_rank(rank, ranks, stand_ins=True) for rank in range(ranks)]
    for one in own:
        if state is not None:
            one.load_state_dict(json.loads(json.dumps(state)))
    iterators, found = [iter(one) for one in own], []
    while number is None or len(found) < number:
        parts = [next(one, None) for one in iterators]
        if parts[0] is None:
            break
        step = [x for one, part in zip(own, parts, strict=True) if one.share.samples for x in ids(part)]
        # Ranks have rows of token batches by their length, with paddings of their own.
        found.append(sorted(x for x in step if x) if isinstance(parts[0], dict) else step)
    states = [one.state_dict() for one in own]
    assert states == [states[0]] * ranks, "the state is the same on all ranks"
    return found, states[0]


def same(found, expected):
    """Return how many steps are the same."""
    return sum(a == b for a, b in zip(found, expected, strict=False))


def changing(take):
    """Return the ids of an epoch in which ranks and workers change three times."""
    state, found = None, []
    for ranks, workers, number in CHANGES:
        more, state = take(ranks, workers, state, number)
        found += more
    return found


def taking(name, folder):
    """Return ``take(ranks, workers, state, number)``, which returns the ids of steps and a state."""
    if name in PEERS:
        return PEERS[name](folder).steps
    loader_of = make(name, folder)
    return lambda ranks, workers, *where: steps(loader_of(workers), ranks, *where)


def failing(run, whole):
    """Return how many steps are the same, or the name of the error of a loader that does not do it."""
    try:
        return same(run(), whole)
    except Exception as error:  # noqa: BLE001 - of any peer
        return type(error).__name__


def main(names):
    columns = list(product(RANKS, WORKERS))
    print(f"{'ranks/workers':<24}" + "".join(f"{f'{r}/{w}':>7}" for r, w in columns) + f"{'changes':>9}")
    is_wrong = False
    for name in names or [*SOURCES, *PEERS]:
        if not is_there(name):
            print(f"{name:<24} not here: {NEEDS[name]} is not installed")
            continue
        with tempfile.TemporaryDirectory() as folder:
            take = taking(name, Path(folder))
            whole, _ = take(1, 0)
            cells = [same(take(ranks, workers)[0], whole) for ranks, workers in columns]
            cells.append(failing(lambda take=take: changing(take), whole))
        is_wrong |= name in SOURCES and cells != [len(whole)] * len(cells)
        *mine, last = [f"{cell}/{len(whole)}" for cell in cells]
        print(f"{name:<24}" + "".join(f"{cell:>7}" for cell in mine) + f"{last:>9}", flush=True)
    return int(is_wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
