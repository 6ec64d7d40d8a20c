"""The launcher announces ranks that exit with status 0, also where torch has collected the status."""

from datetime import timedelta

import pytest
from torch.distributed import TCPStore
from tp_core.launching import EXITED_KEY
from tp_launch._rank_watch import Attempt, Endpoint, ExitedRanks, Rank, RankDeath  # torch collects some


@pytest.mark.parametrize("collected", [0, None], ids=["by us", "by torch"])
def test_a_rank_that_exits_well_is_announced_while_others_run(collected, tmp_path, monkeypatch):
    monkeypatch.setattr("tp_launch._rank_watch._CHECK_S", 0.01)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = {n: Rank(n, 10 + n, tmp_path, tmp_path / "out", tmp_path / "err") for n in range(3)}
    deaths = {1: RankDeath(0, collected), 2: RankDeath(1, 1)}  # one that failed is torch's to report
    exited = ExitedRanks(lambda: deaths)
    try:
        exited.follow(Attempt(4, 1, Endpoint("127.0.0.1", store.port)), ranks)
        store.wait([EXITED_KEY.format(attempt=4, rank=11)], timedelta(seconds=800))
    finally:
        exited.close()
    assert not store.check([EXITED_KEY.format(attempt=4, rank=12)])
