"""StreamingDataset's own tests of elastic determinism, on tp-data and on the peers that are installed.

Source: tests/test_partition.py and tests/test_streaming.py of mosaicml-streaming 0.13.
"""

import pytest
from tp_data import BatchSize, Loader, Stream

SAMPLES, BATCH, RANKS_OF_NODE = 10_000, 960, 8
NODES = [1, 2, 3, 4, 5, 6, 8, 10, 12, 15, 20, 24, 30, 40, 60, 120]
FEW = 117  # of the tests that load samples

STREAMING = pytest.param("streaming", marks=[pytest.mark.needs("streaming"), pytest.mark.nightly])
TORCHDATA = pytest.param("torchdata", marks=pytest.mark.needs("torchdata"))
pytestmark = [  # of theirs, and of torch, which counts the cores of this machine
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]


def ranks_of(peer, nodes, first=0):
    """Return, for each step from a sample on, the samples of each rank."""
    ranks, batch = RANKS_OF_NODE * nodes, BATCH // (RANKS_OF_NODE * nodes)
    if peer == "streaming":
        from streaming.base.partition import get_partitions

        made = get_partitions("relaxed", SAMPLES, 15, nodes, RANKS_OF_NODE, 8, batch, first, 15)
        return made.transpose(3, 2, 0, 1, 4).reshape(-1, ranks, batch).tolist()
    steps = Loader(Stream(range(SAMPLES), shuffle=True), BATCH).steps(ranks, first=first // BATCH)
    return [[[row.pieces[0].position for row in mine] for mine in parts] for parts in steps]


def whole_steps(peer, nodes, first=0):
    """Return the samples of each step with as many as were asked for: a peer fills up the last with -1."""
    found = [{i for mine in step for i in mine} for step in ranks_of(peer, nodes, first)]
    return [step for step in found if len(step - {-1}) == BATCH]


@pytest.mark.slow
@pytest.mark.parametrize("peer", ["tp-data", STREAMING])
def test_each_step_has_the_same_samples_on_all_numbers_of_nodes_that_divide_the_batch(peer):
    expected = whole_steps(peer, 15)
    assert len(expected) == SAMPLES // BATCH
    for nodes in NODES:
        assert whole_steps(peer, nodes) == expected
        assert whole_steps(peer, nodes, first=4 * BATCH) == expected[4:], "a resume on other nodes"


def test_numbers_of_nodes_that_divide_nothing_have_the_same_steps():
    expected = [sorted(sum(step, [])) for step in ranks_of("tp-data", 15)]
    assert sum(map(len, expected)) == SAMPLES, "the last step, too, without repeated samples"
    for nodes in (7, 9, 11, 50):
        found = ranks_of("tp-data", nodes)
        assert [sorted(sum(step, [])) for step in found] == expected
        sizes = {len(mine) for step in found[:-1] for mine in step}
        assert max(sizes) - min(sizes) <= 1


@pytest.mark.slow
def test_a_seek_to_any_sample_has_those_that_are_left_once():
    for position in range(500):
        loader = Loader(Stream(range(1000)), 22 * 8 * 10)
        state = {**loader.state_dict(), "position": position, "batch": 1}
        own = loader.for_rank(3, 22 * 8)
        own.load_state_dict(state)
        (batch,) = own
        least = (1000 - position) // 176
        assert len(batch) in (least, least + 1)
        assert own.share.total == 1000 - position


def loader_of(peer, folder, batch, workers, shuffle):
    rows = [{"id": i} for i in range(FEW)]
    options = {"batch_size": batch, "num_workers": workers}
    if peer == "torchdata":
        from torchdata.stateful_dataloader import StatefulDataLoader

        return StatefulDataLoader(rows, shuffle=shuffle, **options)
    if peer == "streaming":
        import streaming

        streaming.base.util.clean_stale_shared_memory()
        if not (folder / "index.json").exists():
            with streaming.MDSWriter(out=str(folder), columns={"id": "int"}, size_limit=256) as out:
                for row in rows:
                    out.write(row)
        made = streaming.StreamingDataset(
            local=str(folder), shuffle=shuffle, batch_size=batch, shuffle_seed=3456, num_canonical_nodes=1
        )
        return streaming.StreamingDataLoader(made, **options)
    return Loader(Stream(rows, shuffle=shuffle), batch, workers=workers)


def ids_of(loader, number=None):
    """Return the ids of so many batches, and the state behind them."""
    found, iterator = [], iter(loader)
    for batch in iterator:
        found += batch["id"].tolist()
        if number is not None and len(found) >= number:
            break
    return found, None if number is None else loader.state_dict()


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(
    ("batch", "workers"), [(1, 0), (4, 0), pytest.param(4, 4, marks=pytest.mark.nightly)]
)
@pytest.mark.parametrize("peer", ["tp-data", TORCHDATA, STREAMING])
def test_a_resume_in_the_middle_of_an_epoch_loses_and_repeats_nothing(
    peer, batch, workers, shuffle, tmp_path
):
    begun, state = ids_of(loader_of(peer, tmp_path, batch, workers, shuffle), FEW // 2)
    again = loader_of(peer, tmp_path, batch, workers, shuffle)
    again.load_state_dict(state)
    assert sorted(begun + ids_of(again)[0]) == list(range(FEW))


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(("batch", "workers"), [(7, 0), pytest.param(5, 3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("peer", ["tp-data", STREAMING])
def test_the_batch_size_and_the_workers_may_change_there(peer, batch, workers, shuffle, tmp_path):
    begun, state = ids_of(loader_of(peer, tmp_path, 4, 0, shuffle), FEW // 2)
    again = loader_of(peer, tmp_path, batch, workers, shuffle)
    again.load_state_dict(state)
    rest, _ = ids_of(again)
    assert sorted(begun + rest) == list(range(FEW))
    if peer == "tp-data":
        assert begun + rest == ids_of(loader_of(peer, tmp_path, 4, 0, shuffle))[0], "and in the same order"


@pytest.mark.parametrize("last", ["spread", "drop"])
def test_without_a_shuffle_the_order_is_the_sources(last):
    loader = Loader(Stream(range(FEW)), BatchSize(4, last=last, collate=list))
    found = list(loader)
    assert len(found) == len(loader) == (29 if last == "drop" else 30)
    assert sum(found, []) == list(range(4 * 29 if last == "drop" else FEW))
