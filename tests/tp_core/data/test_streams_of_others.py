"""Streams of Hugging Face's datasets and of torchdata, where they are installed."""

from importlib.util import find_spec
from itertools import islice

import pytest
from torch.utils.data import DataLoader
from tp_core.data import PreparedLoader

from tests.cases import first_fast

pytestmark = pytest.mark.skipif(find_spec("datasets") is None, reason="datasets is not installed")


def rows(shards):
    for shard in shards:
        yield from ({"x": 10 * shard + i} for i in range(10))


def dataset():
    import datasets

    return datasets.IterableDataset.from_generator(rows, gen_kwargs={"shards": [0, 1, 2, 3]})


def numbers(items):
    return [item["x"] for item in items]


def prepared(loader, **options):
    found = PreparedLoader(loader, **options)
    found.continues_stream = True
    return found


@pytest.mark.parametrize("workers", first_fast([0, 2]))
def test_each_row_is_on_one_rank_and_in_one_worker(workers):
    seen = []
    for rank in range(2):
        loader = DataLoader(dataset(), batch_size=4, num_workers=workers, collate_fn=numbers)
        seen += sum(PreparedLoader(loader, rank=rank, size=2), [])
    assert sorted(seen) == list(range(40))


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata's own call
@pytest.mark.parametrize("workers", [None, 0, 2])
def test_each_rank_goes_on_where_it_stood(workers):
    def own():
        options = {"batch_size": 4, "collate_fn": numbers}
        if workers is None:
            loader = DataLoader(dataset(), **options)
        else:
            torchdata = pytest.importorskip("torchdata.stateful_dataloader")
            loader = torchdata.StatefulDataLoader(dataset(), num_workers=workers, **options)
        return prepared(loader, rank=1, size=2)

    whole = own()
    expected = [list(islice(whole, 3)) for _ in range(3)]
    parts, resumed = own(), own()
    assert [list(islice(parts, 3)), list(islice(parts, 2))] == [expected[0], expected[1][:2]]
    resumed.load_state_dict(parts.state_dict(batches=2))
    assert [*islice(resumed, 1), *islice(resumed, 3)] == [*expected[1][2:], *expected[2]]
