"""Workers on an accelerator: tensors in and out, the current device, and forks."""

import pytest
import torch
import tp_runner
from tp_core.errors import ConfigError
from tp_runner import OrderedRunner

from tests.accelerator import GPU, SECOND, needs_two

pytestmark = pytest.mark.gpu


class Scales(OrderedRunner):
    @staticmethod
    def producer_init(device, cfg):
        cfg.weight = torch.full((4,), 2.0, device=device)

    @staticmethod
    def producer_work(device, cfg, item):
        x = item.to(device)
        assert x.device == cfg.weight.device
        return (x * cfg.weight).cpu()


class Tells(OrderedRunner):
    @staticmethod
    def producer_work(device, cfg, item):
        where = torch.zeros(1, device=torch.device(device).type)  # without an index: the current one
        return str(device), str(where.device)


class KeepsThere(OrderedRunner):
    @staticmethod
    def producer_work(device, cfg, item):
        return torch.full((3,), float(item), device=device)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("engine", ["process", "thread", "inline"])
def test_host_tensors_go_in_and_come_out(engine):
    items = [torch.full((4,), float(i)) for i in range(20)]
    with Scales([GPU], engine=engine) as runner:
        found = list(runner.stream(items))
    assert [float(y[0]) for y in found] == [2.0 * i for i in range(20)]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("engine", ["process", "thread"])
def test_two_workers_share_one_card(engine):
    items = [torch.full((4,), float(i)) for i in range(20)]
    with Scales([GPU, GPU], engine=engine) as runner:
        assert [float(y[0]) for y in runner.stream(items)] == [2.0 * i for i in range(20)]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("engine", ["process", "thread", "inline"])
@pytest.mark.parametrize("device", [GPU, pytest.param(SECOND, marks=needs_two)])
def test_the_workers_device_is_the_current_one(engine, device):
    before = torch.accelerator.current_device_index()
    with Tells([device], engine=engine) as runner:
        assert list(runner.stream([0])) == [(device, device)]
    assert torch.accelerator.current_device_index() == before


@pytest.mark.timeout(120)
@pytest.mark.parametrize("engine", ["thread", "inline"])
def test_results_may_stay_on_the_card_within_one_process(engine):
    with KeepsThere([GPU], engine=engine) as runner:
        found = list(runner.stream([1, 2]))
    assert [y.device for y in found] == [torch.device(GPU)] * 2
    assert [float(y.sum()) for y in found] == [3.0, 6.0]


@pytest.mark.timeout(120)
def test_tensors_of_the_card_cross_processes():
    items = [torch.full((4,), float(i), device=GPU) for i in range(4)]
    with Scales([GPU]) as runner:
        found = list(runner.stream(items))
    assert [float(y[0]) for y in found] == [0.0, 2.0, 4.0, 6.0]


@pytest.mark.timeout(120)
def test_a_fork_of_a_process_that_knows_the_card_is_refused():
    with (
        pytest.raises(ConfigError, match=r"'fork' cannot have .* devices"),
        Scales([GPU], start_method="fork") as runner,
    ):
        list(runner.stream([torch.zeros(4)]))


def load(device):
    return torch.nn.Linear(4, 2).to(device)


def predict(model, batch):
    with torch.inference_mode():
        return model(batch.to(next(model.parameters()).device)).cpu()


@pytest.mark.timeout(120)
def test_map_takes_batches_through_a_model_on_the_card():
    items = [torch.full((4,), float(i)) for i in range(10)]
    found = list(tp_runner.map(predict, items, devices=[GPU], init=load, batch=4))
    assert len(found) == 10
    assert found[0].shape == (2,)
