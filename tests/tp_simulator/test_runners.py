"""Workers of a runner on the devices: each has its own as the current one."""

import pytest
import torch
from tp_core.errors import ConfigError

tp_runner = pytest.importorskip("tp_runner")

pytestmark = pytest.mark.simulated


def where(_):
    return torch.accelerator.current_device_index(), str(torch.zeros(1, device="sim").device)


def both(state, item):
    return state, where(item)


@pytest.mark.parametrize("engine", ["inline", "thread", pytest.param("process", marks=pytest.mark.slow)])
def test_each_worker_has_its_device_as_the_current_one(engine):
    torch.accelerator.set_device_index(0)
    found = list(tp_runner.map(both, [0], devices=["sim:1"], engine=engine, init=where))
    assert found == [((1, "sim:1"), (1, "sim:1"))]
    assert torch.accelerator.current_device_index() == 0


def test_a_fork_is_refused():
    with pytest.raises(ConfigError, match="'fork' cannot have SIM devices"):
        list(tp_runner.map(where, [0], devices=["sim:1"], start_method="fork"))
