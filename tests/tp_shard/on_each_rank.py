"""What tests on ranks share: a rank's shard of a whole tensor, a split model, cases drawn alike by all."""

import tp_shard as ts
from hypothesis import HealthCheck, Phase, given, settings
from torch import nn


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


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(6, 6)
        self.up = ts.nn.ParallelLinear(6, 9, dim=1)
        self.down = ts.nn.ParallelLinear(9, 6, dim=0)

    def forward(self, x):
        return self.down(self.up(self.stem(x)).tanh()) + x


class PlainNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.up, self.down = nn.Linear(6, 6), nn.Linear(6, 9), nn.Linear(9, 6)

    forward = Net.forward
