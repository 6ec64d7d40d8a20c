"""Large arrays and tensors of the configuration are there once, however many workers there are."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
import tp_runner
from tp_runner import OrderedRunner

METHODS = [
    "forkserver",
    pytest.param("fork", marks=pytest.mark.slow),
    pytest.param("spawn", marks=pytest.mark.nightly),
]
NBYTES = 32 << 20


def private_memory(pid):
    """Return how many bytes a process shares with nobody."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Private_"))


class Holds(OrderedRunner):
    @staticmethod
    def producer_work(device, cfg, item):
        total = sum(float(part.sum()) for part in cfg.parts)
        return total, private_memory(os.getpid())


class Writes(OrderedRunner):
    @staticmethod
    def producer_init(device, cfg):
        cfg.parts[0][0] = tp_runner.worker().number + 10.0

    @staticmethod
    def producer_work(device, cfg, item):
        return tp_runner.worker().number, float(cfg.parts[0][0])


@pytest.mark.parametrize(
    ("make", "method"),
    [
        pytest.param(torch.ones, "forkserver", id="tensor-forkserver", marks=pytest.mark.slow),
        pytest.param(np.ones, "fork", id="array-fork", marks=pytest.mark.slow),
        pytest.param(torch.ones, "spawn", id="tensor-spawn", marks=pytest.mark.nightly),
        pytest.param(np.ones, "spawn", id="array-spawn", marks=pytest.mark.nightly),
    ],
)
def test_workers_hold_no_copy_of_their_own(method, make):
    held = []
    for size in (1000, NBYTES // 8):
        part = make(size, dtype=np.float64 if make is np.ones else torch.float64)
        with Holds(2, cfg={"parts": [part]}, start_method=method) as runner:
            results = list(runner.stream(range(20)))
        assert {total for total, _ in results} == {float(size)}
        held.append(max(nbytes for _, nbytes in results))
    assert held[1] - held[0] < NBYTES // 4


@pytest.mark.parametrize("method", METHODS)
def test_a_worker_that_writes_to_it_writes_for_itself(method):
    part = np.zeros(100_000)
    with Writes(2, cfg={"parts": [part]}, start_method=method) as runner:
        assert set(runner.stream(range(100))) <= {(0, 10.0), (1, 11.0)}
    assert part[0] == 0.0


@pytest.mark.slow
def test_a_closure_shares_its_arrays_too():
    table = np.arange(NBYTES // 8)

    def look(i):
        return int(table[i]), private_memory(os.getpid())

    def look_nowhere(i):
        return i, private_memory(os.getpid())

    with_table, without = (
        list(tp_runner.map(function, range(20), n_workers=2)) for function in (look, look_nowhere)
    )
    assert [value for value, _ in with_table] == list(range(20))
    assert max(n for _, n in with_table) - max(n for _, n in without) < NBYTES // 4


def test_a_model_travels_with_what_it_ties():
    model = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.Linear(300, 300))
    model[1].weight = model[0].weight
    base = torch.arange(40_000.0)
    cfg = {"model": model, "base": base, "part": base[100:200].view(10, 10).t()}

    class Asks(OrderedRunner):
        @staticmethod
        def producer_work(device, cfg, item):
            cfg.base[100] = 5.0
            tied = cfg.model[0].weight is cfg.model[1].weight
            return tied, float(cfg.part[0, 0]), cfg.part.stride(), cfg.model(item)

    item = torch.randn(2, 300)
    with Asks(1, cfg=cfg) as runner:
        (answer,) = runner.stream([item])
    assert answer[:3] == (True, 5.0, (1, 10))
    torch.testing.assert_close(answer[3], model(item), rtol=0, atol=0)


def test_a_revived_worker_has_it_as_well(tmp_path):
    class Mortal(OrderedRunner):
        @staticmethod
        def producer_work(device, cfg, item):
            if item == 3 and not (tmp_path / "dead").exists():
                (tmp_path / "dead").touch()
                os._exit(1)
            return float(cfg.part[item])

    with Mortal(1, cfg={"part": np.arange(50_000.0)}, max_restarts=1) as runner:
        assert list(runner.stream(range(6))) == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
