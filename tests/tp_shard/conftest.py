"""Many checks in one group of started processes: starting them costs more than the checks."""

import pytest
import torch
from tp_core.testing import run_ranks


def _run(checks, init):
    import warnings

    import tp_shard as ts

    warnings.simplefilter("error")
    if init is not None:
        ts.distributed.init_process_group(init)
    results = []
    for check in checks:
        torch.manual_seed(0)
        results.append(check())
    return results


@pytest.fixture(scope="session")
def on_ranks():
    """``on_ranks(n, check, ...)`` runs the checks on n ranks, in groups of ``group_size``.

    It returns for each rank what its checks returned.
    """

    def start(processes, *checks, group_size=-1, timeout_s=50.0):
        return run_ranks(_run, processes, checks, group_size, timeout_s=timeout_s)

    return start


@pytest.fixture(autouse=True, scope="session")
def one_thread_per_operation():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
