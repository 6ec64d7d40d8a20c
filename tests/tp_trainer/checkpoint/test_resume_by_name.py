"""A resumed run knows parameters by their names, and says which one is missing or new."""

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset
from tp_core.errors import ConfigError, StateError
from tp_trainer import Trainer


def make_model(layers=2):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(3, 3) for _ in range(layers))).double()


def step(model, batch):
    return (model(batch[0]) - batch[0].sin()).square().mean()


def fit(folder, optimizer_of, *, epochs, model=None, scheduler=None, resume="auto", trainer=None):
    model = make_model() if model is None else model
    x = torch.randn(12, 3, generator=torch.Generator().manual_seed(1)).double()
    optimizer = optimizer_of(model)
    arguments = {} if folder is None else {"checkpoint": folder, "resume": resume}
    with Trainer(seed=0, progress=False, devices="cpu", **(trainer or {})) as running:
        running.fit(
            model,
            optimizer,
            DataLoader(TensorDataset(x), batch_size=4, shuffle=True),
            step=step,
            epochs=epochs,
            scheduler=None if scheduler is None else scheduler(optimizer),
            **arguments,
        )
    return [p.detach().clone() for p in model.parameters()]


def forward(model):
    return Adam(model.parameters(), lr=0.01)


def backward(model):
    return Adam(list(model.parameters())[::-1], lr=0.01)


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_momentum_goes_to_its_own_layer_when_parameters_come_in_another_order(tmp_path):
    fit(tmp_path, forward, epochs=1)
    assert same(fit(tmp_path, backward, epochs=3), fit(None, forward, epochs=3))


def momentum_on_ranks(folder):
    fit(folder, forward, epochs=1)
    return same(fit(folder, backward, epochs=3), fit(None, forward, epochs=3))


def test_and_so_it_does_on_ranks(two_ranks, tmp_path):
    assert two_ranks.run(momentum_on_ranks, tmp_path) == [True, True]


def groups(*order):
    rates = {0: 0.1, 1: 0.02}
    return lambda model: SGD([{"params": model[i].parameters(), "lr": rates[i]} for i in order], momentum=0.9)


def test_groups_may_come_in_another_order(tmp_path):
    fit(tmp_path, groups(0, 1), epochs=1)
    assert same(fit(tmp_path, groups(1, 0), epochs=3), fit(None, groups(0, 1), epochs=3))


def decay(optimizer):
    return StepLR(optimizer, 1, 0.5)


def test_groups_in_another_order_are_refused_beside_a_scheduler_that_counts_them(tmp_path):
    fit(tmp_path, groups(0, 1), epochs=1, scheduler=decay)
    with pytest.raises(StateError, match=r"groups come in another order.* the scheduler keeps its numbers"):
        fit(tmp_path, groups(1, 0), epochs=3, scheduler=decay)
    found = fit(tmp_path, groups(0, 1), epochs=3, scheduler=decay)
    assert same(found, fit(None, groups(0, 1), epochs=3, scheduler=decay))


def head_only(model):
    return Adam(model[1].parameters(), lr=0.01)


def test_a_parameter_that_is_missing_or_new_is_named(tmp_path):
    fit(tmp_path / "all", forward, epochs=1)
    with pytest.raises(StateError, match=r"with the parameter '0.bias' \(and 1 more\), which this one lacks"):
        fit(tmp_path / "all", head_only, epochs=2)
    fit(tmp_path / "head", head_only, epochs=1)
    with pytest.raises(
        StateError, match=r"without the parameter '0.bias' \(and 1 more\), which this one has"
    ):
        fit(tmp_path / "head", forward, epochs=2)
    assert same(fit(tmp_path / "head", head_only, epochs=3), fit(None, head_only, epochs=3))


def test_a_compiled_model_goes_on_as_a_plain_one_and_the_other_way_round(tmp_path):
    def compiled():
        return torch.compile(make_model(), backend="eager")

    fit(tmp_path, forward, epochs=1)
    fit(tmp_path, forward, epochs=2, model=compiled())
    assert same(fit(tmp_path, forward, epochs=3), fit(None, forward, epochs=3))


def load(path):
    model = make_model()
    with Trainer(progress=False, devices="cpu") as trainer:
        trainer.load_model(model, path)
        return [p.detach().clone() for p in trainer.session.unwrap(model).parameters()]


def damaged_on_ranks(path):
    with pytest.raises(StateError) as caught:
        load(path)
    return str(caught.value)


def test_the_model_of_a_checkpoint_is_loaded_by_itself_unless_it_is_damaged(two_ranks, tmp_path):
    expected = fit(tmp_path, forward, epochs=1)
    (checkpoint,) = tmp_path.glob("step-*")
    assert same(load(checkpoint), expected)
    data = bytearray((checkpoint / "tensors.pt").read_bytes())
    data[data.index(expected[1].numpy().tobytes())] ^= 1
    (checkpoint / "tensors.pt").write_bytes(data)
    for message in two_ranks.run(damaged_on_ranks, checkpoint):
        assert "is damaged: tensors.pt" in message
    with pytest.raises(StateError, match=r"manifest\.json"):
        load(tmp_path)


@pytest.mark.filterwarnings("ignore")  # torch's own, of the import
def test_an_optimizer_whose_state_no_rank_has_whole_is_refused_before_the_first_step(tmp_path):
    import torch.distributed as dist
    from torch.distributed.optim import ZeroRedundancyOptimizer

    def split(model):
        return ZeroRedundancyOptimizer(model.parameters(), Adam, lr=0.01)

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        fit(None, split, epochs=1)
        with pytest.raises(
            ConfigError, match=r"ZeroRedundancyOptimizer cannot be saved.* the optimizer that it wraps"
        ):
            fit(tmp_path / "run", split, epochs=1)
    finally:
        dist.destroy_process_group()
    assert not (tmp_path / "run").exists()


class SharpnessAware(torch.optim.Optimizer):
    """Steps an optimizer within, which has its groups, as common implementations of SAM do."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})
        self.base_optimizer = torch.optim.SGD(self.param_groups, lr=0.1, momentum=0.9)
        self.param_groups = self.base_optimizer.param_groups

    def step(self, closure=None):
        self.base_optimizer.step()

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        self.base_optimizer.param_groups = self.param_groups


def test_an_optimizer_within_another_is_resumed_with_the_same_groups(tmp_path):
    data = DataLoader(TensorDataset(torch.randn(12, 3)), batch_size=4)

    def weights(folder, **limits):
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        optimizer = SharpnessAware(model.parameters())
        with Trainer(seed=0, progress=False, devices="cpu") as trainer:
            trainer.fit(
                model,
                optimizer,
                data,
                step=lambda model, batch: (model(batch[0]) - 1).square().mean(),
                epochs=3,
                scheduler=torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
                checkpoint=folder,
                resume="auto",
                state={"inner": optimizer.base_optimizer},
                **limits,
            )
        return model.weight

    weights(tmp_path / "cut", max_steps=4)
    assert torch.equal(weights(tmp_path / "cut"), weights(tmp_path / "whole"))
