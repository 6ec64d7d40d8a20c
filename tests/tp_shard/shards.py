"""What tests on ranks share: a rank's shard of a whole tensor, and cases that are the same on all ranks."""

import tp_shard as ts
from hypothesis import HealthCheck, Phase, given, settings


def own(full, dim=-1):
    """This rank's shard of a whole tensor."""
    return ts.slice(full, ts.distributed.get_world_size(), dim)[ts.distributed.get_rank()]


def drawn(strategy, count):
    """Draw some cases, the same ones in every process."""
    found = []

    @settings(
        max_examples=count,
        database=None,
        derandomize=True,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def collect(case):
        found.append(case)

    collect()
    return found
