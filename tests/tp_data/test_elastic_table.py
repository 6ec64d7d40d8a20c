"""All kinds of sources have the same ids in each step, on any ranks and workers that change in the epoch."""

import pytest

from tests.tp_data.elastic_table import RANKS, SOURCES, changing, is_there, main, taking

# Each source with another number of ranks.
PAIRS = list(zip(filter(is_there, SOURCES), RANKS[1:] * 4, strict=False))
# Torch counts the cores of this machine.
MANY = pytest.mark.filterwarnings("ignore:This DataLoader will create")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "ranks"), PAIRS)
def test_each_kind_of_source_is_elastic(name, ranks, tmp_path):
    take = taking(name, tmp_path)
    whole, _ = take(1, 0)
    assert take(ranks, 0)[0] == whole
    assert take(1, 1)[0] == whole


@MANY
@pytest.mark.slow
@pytest.mark.parametrize("name", ["lines of JSON", "a mixture that changes", "Packed"])
def test_ranks_and_workers_change_three_times_in_the_epoch(name, tmp_path):
    take = taking(name, tmp_path)
    assert changing(take) == take(1, 0)[0]


@MANY
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torch's word to torchdata 0.11
@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_the_whole_table():
    assert main([]) == 0
