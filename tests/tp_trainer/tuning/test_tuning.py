"""A range test and a search for the largest batch find something, and leave no trace."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from tp_core.errors import ConfigError, LoaderError
from tp_testing import run_ranks
from tp_trainer import Trainer
from tp_trainer.tuning import largest_batch_size, learning_rate_range_test

from tests.reference_training import rows_and_sums, squared_error

BACKENDS = {
    "single": {"backend": "single", "devices": "cpu"},
    "tuple": {"backend": "tuple", "devices": ["cpu"] * 2},
    "dp-gather": {"backend": "dp-gather", "devices": ["cpu"] * 2},
    "ddp": {"backend": "ddp", "devices": "cpu"},
}


def network():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 1)).double()


def loader(batch_size=4):
    return DataLoader(rows_and_sums(22), batch_size=batch_size, shuffle=True)


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=0.01)


def hungry(most):
    """Return a step that asks for more memory than there is, where it gets more samples."""

    def step_in_little_memory(model, batch):
        if len(batch[0]) > most:
            torch.empty(2**60, dtype=torch.uint8)
        return squared_error(model, batch)

    return step_in_little_memory


def test_the_rates_grow_until_the_loss_does_and_one_before_is_suggested():
    with Trainer(seed=0, devices="cpu", progress=False) as trainer:
        model = nn.Linear(3, 1).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        found = learning_rate_range_test(
            trainer, model, optimizer, loader(), step=squared_error, lowest=1e-6, highest=10, steps=60
        )
    assert found.rates[0] == pytest.approx(1e-6)
    assert all(a < b for a, b in zip(found.rates, found.rates[1:], strict=False))
    assert len(found.rates) == len(found.losses) == len(found.smoothed) < 60  # it ended where the loss grew
    assert 1e-3 < found.suggestion < 0.5


def losses(backend):
    with Trainer(**BACKENDS[backend], seed=0, progress=False) as trainer:
        model = network().eval()  # no dropout: but it is trained in its training mode
        model[2] = nn.Identity()
        found = learning_rate_range_test(trainer, model, adam(model), loader(), step=squared_error, steps=8)
    return found.losses


@pytest.mark.parametrize("backend", ["tuple", "dp-gather"])
def test_the_losses_are_those_of_one_device(backend):
    assert losses(backend) == pytest.approx(losses("single"), rel=1e-9)


def on_a_rank():
    with Trainer(**BACKENDS["ddp"], seed=0, progress=False) as trainer:
        model = network()
        found = largest_batch_size(
            trainer, model, adam(model), loader(), step=hungry(6 + 3 * trainer.rank), most=50
        )
    return losses("ddp"), found


@pytest.mark.slow
def test_ranks_have_the_losses_of_one_device_and_find_one_batch_size():
    for found, size in run_ranks(on_a_rank, 2):
        assert found == pytest.approx(losses("single"), rel=1e-9)
        assert size == 12  # 6 samples for each rank, of which the other could have 9


def trained(backend, *, search):
    """Return the weights of a run in two parts, with a search before each or without."""
    with Trainer(**BACKENDS[backend], seed=0, progress=False) as trainer:
        model, batches = network(), loader()
        optimizer = adam(model)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        for _ in range(2):
            if search:
                learning_rate_range_test(
                    trainer, model, optimizer, batches, step=squared_error, steps=5, highest=1e3
                )
                largest_batch_size(trainer, model, optimizer, batches, step=hungry(5), most=16)
            trainer.fit(model, optimizer, batches, step=squared_error, scheduler=scheduler)
        return [p.detach().clone() for p in model.parameters()], copy.deepcopy(optimizer.state_dict())


@pytest.mark.parametrize(
    "backend", ["single", *(pytest.param(name, marks=pytest.mark.slow) for name in ("tuple", "dp-gather"))]
)
def test_a_run_is_the_same_after_them(backend):
    (weights, state), (expected, expected_state) = (
        trained(backend, search=True),
        trained(backend, search=False),
    )
    assert all(torch.equal(a, b) for a, b in zip(weights, expected, strict=True))
    assert state["param_groups"] == expected_state["param_groups"]
    assert all(
        torch.equal(state["state"][i][name], value)
        for i, kept in expected_state["state"].items()
        for name, value in kept.items()
    )


def test_gradients_and_modes_stay_as_they_were():
    model, optimizer = network().eval(), None
    optimizer = adam(model)
    model[0].weight.grad = torch.ones_like(model[0].weight)
    with Trainer(seed=0, devices="cpu", progress=False) as trainer:
        learning_rate_range_test(trainer, model, optimizer, loader(), step=squared_error, steps=3)
    assert torch.equal(model[0].weight.grad, torch.ones_like(model[0].weight))
    assert model[3].weight.grad is None
    assert not any(module.training for module in model.modules())
    assert not optimizer.state


def test_the_proportions_of_groups_are_kept():
    seen, model = [], network()
    optimizer = torch.optim.SGD(
        [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[3].parameters(), "lr": 1.0}]
    )
    optimizer.register_step_pre_hook(lambda o, *_: seen.append([group["lr"] for group in o.param_groups]))
    with Trainer(seed=0, devices="cpu", progress=False) as trainer:
        found = learning_rate_range_test(trainer, model, optimizer, loader(), step=squared_error, steps=4)
    assert seen == [pytest.approx([rate / 10, rate]) for rate in found.rates]
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 1.0]


@pytest.mark.parametrize(
    ("backend", "expected"),
    [("single", 13), ("dp-gather", 13), pytest.param("tuple", 26, marks=pytest.mark.slow)],
)
def test_the_largest_batch_that_fits_is_found(backend, expected):
    with Trainer(**BACKENDS[backend], seed=0, progress=False) as trainer:
        model = network()
        found = largest_batch_size(trainer, model, adam(model), loader(), step=hungry(13), most=60)
    assert found == expected


def test_the_search_ends_at_the_most_that_is_wanted():
    with Trainer(seed=0, devices="cpu", progress=False) as trainer:
        model = network()
        assert largest_batch_size(trainer, model, adam(model), loader(), step=squared_error, most=37) == 37
        with pytest.raises(MemoryError, match="not even a batch of 1"):
            largest_batch_size(trainer, model, adam(model), loader(), step=hungry(0))
        with pytest.raises(RuntimeError, match="mat1 and mat2"):
            largest_batch_size(trainer, model, adam(model), loader(), step=lambda m, b: m(b[1]).sum())


def test_wrong_values_are_refused():
    model = network()
    with Trainer(seed=0, devices="cpu", progress=False) as trainer:
        with pytest.raises(ConfigError, match="needs 0 < lowest < highest and stop_at > 1"):
            learning_rate_range_test(
                trainer, model, adam(model), loader(), step=squared_error, lowest=1.0, highest=0.1
            )
        without_rate = torch.optim.Optimizer(model.parameters(), {})
        with pytest.raises(ConfigError, match="Optimizer has parameter groups without one"):
            learning_rate_range_test(trainer, model, without_rate, loader(), step=squared_error)
        with pytest.raises(LoaderError, match="the loader yields nothing"):
            learning_rate_range_test(trainer, model, adam(model), [], step=squared_error)
        with pytest.raises(ConfigError, match="a DataLoader over a dataset with indices"):
            largest_batch_size(trainer, model, adam(model), [1], step=squared_error)


def test_a_loss_that_does_not_fall_suggests_nothing():
    with Trainer(seed=0, devices="cpu", progress=False) as trainer:
        model = network()
        found = learning_rate_range_test(
            trainer, model, adam(model), loader(), step=lambda m, b: squared_error(m, b) * 0 + 1, steps=5
        )
    assert found.suggestion is None
