"""Sources that are iterated elsewhere, too, have the samples of that iteration, in its order."""

import random

import pytest
import torch
from torch.utils.data import TensorDataset
from tp_core.errors import ConfigError, StateError
from tp_data import BatchSize, Iterables, Loader, Shuffle, Stream

from tests.cases import first_fast

SIZES = [1, 1500, 3, 996]  # of shards; states are noted after 1000 samples


def rows_of(shards):
    for shard in shards:
        for i in range(SIZES[shard]):
            yield {"id": shard * 10_000 + i}


def uneven():
    import datasets

    return datasets.IterableDataset.from_generator(rows_of, gen_kwargs={"shards": [0, 1, 2, 3]})


def even(count=2500):
    import datasets

    return datasets.Dataset.from_dict({"id": range(count)}).to_iterable_dataset(num_shards=4)


def interleaved(**options):
    import datasets

    return datasets.interleave_datasets([uneven(), even(700)], **options)


def concatenated():
    import datasets

    return datasets.concatenate_datasets([uneven(), even()])


def doubled(batch):
    return {"id": [row for row in batch["id"] for _ in range(2)]}


def size_of(batch):
    return {"id": [len(batch["id"])]}


OPERATIONS = {
    "plain": even,
    "uneven shards": uneven,
    "skip": lambda: even().skip(10),
    "skip of uneven shards": lambda: uneven().skip(1200),
    "take": lambda: even().take(1100),
    "take of uneven shards": lambda: uneven().take(1400),
    "skip and take": lambda: uneven().skip(3).take(1600),
    "repeat": lambda: even(600).repeat(3),
    "interleave": interleaved,
    "interleave until all end": lambda: interleaved(stopping_strategy="all_exhausted"),
    "interleave by chance": lambda: interleaved(probabilities=[0.7, 0.3], seed=1),
    "concatenate": concatenated,
    "map": lambda: even().map(lambda row: {"id": -row["id"]}),
    "map of batches": lambda: even().map(doubled, batched=True, batch_size=7),
    "map that counts in batches": lambda: uneven().map(size_of, batched=True, batch_size=3),
    "filter": lambda: uneven().filter(lambda row: row["id"] % 3 != 0),
    "batch": lambda: even().batch(2),
    "select of columns": lambda: even().select_columns("id"),
    "shuffle": lambda: even().shuffle(seed=1, buffer_size=100),
    "shuffle, then take": lambda: uneven().shuffle(seed=1, buffer_size=100).take(2000),
    "numpy": lambda: even().with_format("numpy"),
}


def loaded(dataset, **options):
    loader = Loader(Stream(dataset, transform=lambda row: row), BatchSize(64, collate=list), **options)
    return [row for batch in loader for row in batch]


@pytest.mark.needs("datasets")
@pytest.mark.parametrize("operation", first_fast(OPERATIONS, 4))
def test_samples_of_a_dataset_that_streams_are_its_own(operation, caplog):
    expected = [str(row) for row in OPERATIONS[operation]()]
    assert [str(row) for row in loaded(OPERATIONS[operation]())] == expected
    source = Stream(OPERATIONS[operation]()).sources["data"]
    places = random.Random(0).sample(range(len(expected)), 12)
    assert [str(source[at]) for at in places] == [expected[at] for at in places]
    assert ("its states do not lead back" in caplog.text) == operation.startswith("shuffle")


@pytest.mark.needs("datasets")
def test_nothing_that_was_taken_to_validate_is_trained_on():
    taken, left = ({row["id"] for row in loaded(part)} for part in (even(40).take(10), even(40).skip(10)))
    assert (len(taken), len(left), taken & left) == (10, 30, set())


@pytest.mark.needs("datasets")
@pytest.mark.parametrize("ranks", [2, 3])
def test_samples_of_a_dataset_that_streams_are_its_own_on_ranks(ranks):
    loader = Loader(Stream(even(40).skip(10)), BatchSize(6, collate=list))
    parts = [list(loader.for_rank(rank, ranks)) for rank in range(ranks)]
    steps = [sum(step, []) for step in zip(*parts, strict=True)]
    assert sum(steps, []) == list(even(40).skip(10))


@pytest.mark.needs("datasets")
@pytest.mark.slow
def test_samples_of_a_dataset_that_streams_are_its_own_in_workers():
    assert loaded(uneven().take(1400), workers=2) == list(uneven().take(1400))


@pytest.mark.needs("datasets")
def test_a_part_of_a_dataset_by_rank_is_refused():
    from datasets.distributed import split_dataset_by_node

    with pytest.raises(ConfigError, match=r"split_dataset_by_node\(\) leaves each rank its part"):
        Stream(split_dataset_by_node(even(40), rank=0, world_size=2))


@pytest.mark.needs("datasets")
def test_another_order_of_the_same_samples_is_another_source():
    loader = Loader(Stream(even(40).shuffle(seed=1, buffer_size=40)), 4)
    next(iter(loader))
    with pytest.raises(StateError, match="a source 'data' with other samples"):
        Loader(Stream(even(40).shuffle(seed=2, buffer_size=40)), 4).load_state_dict(loader.state_dict())


class Squares:
    """A map-style dataset."""

    def __len__(self):
        return 70

    def __getitem__(self, index):
        if not 0 <= index < 70:
            raise IndexError(index)
        return {"id": index, "square": torch.tensor(index**2)}


class Batched(Squares):
    """One that loads several samples at once."""

    def __getitems__(self, indices):
        return [self[index] for index in indices]


class Counting:
    """An iterable with states."""

    def __init__(self, shard):
        self.shard, self.next = shard, 0

    def state_dict(self):
        return self.next

    def load_state_dict(self, state):
        self.next = state

    def __iter__(self):
        while self.next < 30 + self.shard:
            self.next += 1
            yield self.shard * 100 + self.next - 1


def table(chunks=3):
    """Return a table with all kinds of columns, in several chunks."""
    import pyarrow as pa

    pairs = list(zip([2**60 + 1, -5], ["one", "zwölf"], [0.1, float("inf")], [True, False], strict=True))
    rows = [
        {"integer": i, "text": s, "number": f, "truth": b, "list": [i, i], "of": {"x": s}, "raw": s.encode()}
        for i, s, f, b in pairs
    ]
    lacking = {"integer": None, "text": None, "number": float("nan"), "truth": None, "list": None}
    made = pa.Table.from_pylist([*rows, rows[0] | lacking])
    for kind in ("uint8", "int16", "float32", "float16"):
        made = made.append_column(kind, pa.array([1, 2, 3]).cast(kind))
    days = pa.array([0, 1, None]).cast("timestamp[ms]")
    made = made.append_column("day", days).append_column("kind", made["text"].dictionary_encode())
    made = made.append_column("long text", made["text"].cast("large_string"))
    return pa.concat_tables([made] * chunks)


def arrow():
    import datasets

    return datasets.Dataset(table())


SEQUENCES = {
    "list": lambda: [*range(70), "a text"],
    "tuple": lambda: tuple(range(70)),
    "range": lambda: range(3, 500, 7),
    "map-style": Squares,
    "map-style, several at once": Batched,
    "TensorDataset": lambda: TensorDataset(torch.arange(70), torch.arange(140.0).view(70, 2)),
    "subset": lambda: torch.utils.data.Subset(Squares(), [5, 1, 1, 69]),
}
OF_DATASETS = {
    "as Arrow": arrow,
    "of chosen rows": lambda: arrow().select([7, 2, 2, 5]),
    "shuffled": lambda: arrow().shuffle(seed=1),
    "of chosen columns": lambda: arrow().with_format(None, ["text", "number"]),
    "all columns": lambda: arrow().with_format(None, ["integer"], output_all_columns=True),
    "a transform of its own": lambda: arrow().with_transform(lambda rows: {"of": rows["text"]}),
}


def assert_own_samples(sequence):
    expected = [repr(sequence[index]) for index in range(len(sequence))]
    for options in ({}, {"transform": lambda sample: sample}):
        loader = Loader(Stream(sequence, **options), BatchSize(4, collate=list))
        assert [repr(sample) for batch in loader for sample in batch] == expected
    shuffled = Loader(Stream(sequence, shuffle=True), BatchSize(4, collate=list))
    assert sorted(repr(sample) for batch in shuffled for sample in batch) == sorted(expected)


@pytest.mark.parametrize("kind", SEQUENCES)
def test_samples_of_a_sequence_are_its_own(kind):
    assert_own_samples(SEQUENCES[kind]())


@pytest.mark.needs("datasets")
@pytest.mark.parametrize("kind", OF_DATASETS)
def test_samples_of_a_dataset_in_memory_are_its_own(kind):
    assert_own_samples(OF_DATASETS[kind]())


@pytest.mark.needs("streaming")
def test_samples_of_shards_of_mosaicml_are_its_own(tmp_path):
    import streaming

    with streaming.MDSWriter(out=str(tmp_path), columns={"id": "int"}, size_limit=256) as out:
        for index in range(70):
            out.write({"id": index})
    assert_own_samples(streaming.LocalDataset(local=str(tmp_path)))


@pytest.mark.parametrize("factory", [Counting, lambda shard: iter(range(shard * 40, shard * 40 + shard))])
def test_samples_of_iterables_are_their_own(factory):
    expected = [sample for shard in range(3) for sample in factory(shard)]
    source = Iterables(factory, 3, every=7)
    assert [
        sample for batch in Loader(Stream(source), BatchSize(4, collate=list)) for sample in batch
    ] == expected


@pytest.mark.needs("pyarrow")
def test_rows_of_parquet_are_those_of_its_table(tmp_path):
    import pyarrow.parquet as pq

    pq.write_table(table(), tmp_path / "a.parquet", row_group_size=4)
    expected = pq.read_table(tmp_path / "a.parquet").to_pylist()
    assert [repr(row) for row in loaded(str(tmp_path / "a.parquet"))] == list(map(repr, expected))


class Forgetful:
    """An iterable whose states lead to other samples."""

    num_shards = 1

    def shard(self, *_):
        return self

    def state_dict(self):
        return {}

    def load_state_dict(self, _):
        self.begin = 7

    def __iter__(self):
        yield from range(getattr(self, "begin", 0), 30)


def test_states_that_lead_elsewhere_are_not_used(caplog):
    source = Iterables(lambda _: Forgetful(), 1, every=10)
    assert [source[at] for at in (25, 3, 29, 10)] == [25, 3, 29, 10]
    assert "shard 0: its states do not lead back to its samples" in caplog.text


def test_an_iterable_that_cannot_be_copied_is_refused():
    import threading

    made = Forgetful()
    made.lock = threading.Lock()
    with pytest.raises(
        ConfigError, match=r"a Forgetful that cannot be copied .* give Iterables\(factory, shards\)"
    ):
        Stream(made)


def test_samples_in_blocks_are_read_once():
    read = 0

    class Counting:
        def __init__(self, begin=0):
            self.begin = begin

        def state_dict(self):
            return self.begin

        def load_state_dict(self, state):
            self.begin = state

        def __iter__(self):
            nonlocal read
            while self.begin < 1000:
                read += 1
                self.begin += 1
                yield self.begin - 1

    source = Iterables(lambda _: Counting(), 1, every=50)
    read = 0
    loader = Loader(Stream(source, shuffle=Shuffle(blocks=50)), BatchSize(10, collate=list))
    assert sorted(sample for batch in loader for sample in batch) == list(range(1000))
    assert read == 1000
