"""Many checks in one group of started processes: starting them costs more than the checks."""

import os
import warnings

import pytest
import torch
from tp_testing import RankPool, run_ranks


def _join(group_size):
    import tp_shard as ts

    ts.distributed.init_process_group(group_size)


def _run(check):
    settings = _settings()
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # torch 2.11's word of tensors that are made with check_invariants=False, as it asks for.
        warnings.filterwarnings("ignore", "Sparse invariant checks are implicitly disabled")
        result = check()
    assert _settings() == settings, "a check has to leave the process as it was"
    return result


def _settings():
    return torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads(), dict(os.environ)


def _join_and_run(check, group_size):
    _join(group_size)
    return _run(check)


@pytest.fixture(scope="session")
def on_ranks():
    """``on_ranks(n, check)`` runs a check on n ranks, in groups of ``group_size``.

    The ranks live on from check to check, unless ``fresh`` ones are asked for. It returns what the
    check returned, by rank.
    """
    pools = {}

    def run(processes, check, *, group_size=-1, fresh=False):
        if fresh:
            return run_ranks(_join_and_run, processes, check, group_size)
        key = processes, group_size
        if key not in pools:
            pools[key] = RankPool(processes, setup=_join, args=(group_size,))
        return pools[key].run(_run, check)

    yield run
    for pool in pools.values():
        pool.close()


@pytest.fixture(autouse=True, scope="session")
def one_thread_per_operation():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
