"""What the tests of the kit of backends share: two ranks, on which all altered backends are tried."""

import pytest
from tp_testing import BackendConformance, RankPool


@pytest.fixture(scope="session")
def pool():
    with RankPool(2, timeout_s=120.0) as pool:
        yield pool


@pytest.fixture
def ranks(pool, monkeypatch):
    """Ranks that every kit of two uses in place of its own."""

    def everywhere(kit, body, *args):
        return pool.run(body, kit, *args)

    monkeypatch.setattr(BackendConformance, "everywhere", everywhere)
    return pool
