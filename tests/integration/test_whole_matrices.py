"""Optimizers that need whole matrices, over shards: the numbers of one device, resumed elsewhere."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tp_core.errors import ConfigError
from tp_testing import RankPool
from tp_trainer import FsdpOptions, Trainer

from tests.models import Block
from tests.reference_training import squared_error

ts = pytest.importorskip("tp_shard")


class Net(nn.Module):
    """Has matrices alone, which is what Muon takes; one is not split by the plan."""

    def __init__(self, *, with_vectors=False):
        super().__init__()
        torch.manual_seed(1)
        self.into = nn.Linear(4, 6, bias=with_vectors)
        self.blocks = nn.ModuleList(Block(6, 9, bias=False) for _ in range(2))
        self.out = nn.Linear(6, 2, bias=with_vectors)
        self.double()

    def forward(self, x):
        x = self.into(x)
        for block in self.blocks:
            x = block(x)
        return self.out(x)


class Shampoo(torch.optim.Optimizer):
    """Keeps a matrix for each side of a parameter, of other shapes, and counts its steps in its group."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr, "steps": 0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["steps"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                grad = p.grad if p.dim() == 2 else p.grad[None]
                state = self.state[p]
                if not state:
                    state["left"] = torch.eye(grad.size(0), dtype=p.dtype) * 0.1
                    state["right"] = torch.eye(grad.size(1), dtype=p.dtype) * 0.1
                    state["momentum"] = torch.zeros_like(p)
                state["left"] += grad @ grad.T
                state["right"] += grad.T @ grad
                update = torch.linalg.solve(state["left"], grad) @ torch.linalg.inv(state["right"])
                state["momentum"].mul_(0.9).add_(update.reshape_as(p))
                p.sub_(state["momentum"], alpha=group["lr"] / group["steps"] ** 0.5 * 0.01)


class TamedMuon(torch.optim.Muon):
    """Steps by its base, within a step of its own."""

    def step(self, closure=None):
        return super().step(closure)


def tamed_muon(model):
    torch.optim.Muon(model.parameters())  # from here on torch calls hooks for the base's step, too
    return TamedMuon(model.parameters(), lr=0.05)


OPTIMIZERS = {
    "TamedMuon": tamed_muon,
    "Muon": lambda model: torch.optim.Muon(model.parameters(), lr=0.05),
    "Adafactor": lambda model: torch.optim.Adafactor(model.parameters(), lr=0.05),
    "Shampoo": lambda model: Shampoo(model.parameters()),
    "Rprop": lambda model: torch.optim.Rprop(model.parameters(), lr=0.01),
}
PLAN = {"blocks.*.up": ts.Column(), "blocks.*.down": ts.Row()}


def loader():
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(3)).double()
    return DataLoader(TensorDataset(x, x[:, :2].sin()), batch_size=4, shuffle=True)


def fit(name, way="single", epochs=2, folder=None):
    """Train, or go on; return the whole weights, the state's keys, and the sizes of a matrix's momentum."""
    backend = way.partition(" ")[0]
    if backend == "shard":
        ts.distributed.init_process_group(2)
    try:
        plain = Net(with_vectors="Muon" not in name)
        model = ts.parallelize(plain, PLAN) if backend == "shard" else plain
        options = None
        if backend == "fsdp":
            options = FsdpOptions(units=Block)
        elif way == "shard x fsdp":
            options = ts.ShardOptions(data="fsdp")
        with Trainer(backend=backend, devices="cpu", options=options, seed=2, progress=False) as trainer:
            optimizer = OPTIMIZERS[name](model)
            arguments = {} if folder is None else {"checkpoint": folder, "resume": "auto"}
            trainer.fit(
                model, optimizer, loader(), step=squared_error, epochs=epochs, clip_norm=0.5, **arguments
            )
            weights = {n: t.clone() for n, t in trainer.session.model_state(model).items()}
            held = sum(
                (v.to_local() if hasattr(v, "to_local") else v).numel()
                for state in optimizer.state.values()
                for key, v in state.items()
                if key in ("momentum", "momentum_buffer", "prev")
            )
            return weights, [len(g["params"]) for g in optimizer.param_groups], held
    finally:
        if backend == "shard":
            ts.distributed.destroy_process_group()


def assert_same(found, expected):
    assert found[0].keys() == expected[0].keys()
    for name, tensor in expected[0].items():
        torch.testing.assert_close(found[0][name], tensor, rtol=1e-5, atol=1e-7)
    assert found[1] == expected[1]


def test_muon_over_shards_is_muon_on_one_device(two_ranks):
    expected = fit("Muon")
    for found in two_ranks.run(fit, "Muon", "fsdp"):
        assert_same(found, expected)
        assert found[2] < 0.7 * expected[2]  # its state is sharded


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("way", ["fsdp", "shard"])
def test_every_kind_is_that_of_one_device_on_two_ranks(two_ranks, name, way):
    expected = fit(name)
    for found in two_ranks.run(fit, name, way):
        assert_same(found, expected)


@pytest.mark.nightly
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("way", ["fsdp", "shard", "shard x fsdp"])
def test_every_kind_is_that_of_one_device_on_four_ranks(name, way):
    expected = fit(name)
    ranks = RankPool(4)
    try:
        for found in ranks.run(fit, name, way):
            assert_same(found, expected)
    finally:
        ranks.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Muon", "Shampoo"])
def test_a_run_is_resumed_on_another_backend(two_ranks, tmp_path, name):
    expected = fit(name, epochs=4)
    for epochs, way in enumerate(["fsdp", "shard", "single", "fsdp"], start=1):
        if way == "single":
            fit(name, way, epochs, tmp_path)
        else:
            found = two_ranks.run(fit, name, way, epochs, tmp_path)
    for each in found:
        assert_same(each, expected)


def refusals():
    found = []
    with Trainer(backend="fsdp", devices="cpu", options=FsdpOptions(units=Block), progress=False) as trainer:
        model = trainer.prepare(Net())
        trainer.backward(trainer.run(squared_error, model, next(iter(loader()))))
        muon = OPTIMIZERS["Muon"](model)
        with pytest.raises(ConfigError) as caught:
            muon.step()
        found.append(str(caught.value))
        trainer.prepare(model, muon)
        with pytest.raises(ConfigError) as caught:
            muon.step(lambda: torch.zeros(()))
        found.append(str(caught.value))
        muon.step()
    return found


@pytest.mark.slow
def test_a_step_without_preparation_or_with_a_closure_is_refused(two_ranks):
    for unprepared, closure in two_ranks.run(refusals):
        assert "Muon computes with whole matrices" in unprepared
        assert "give it to fit(), or to trainer.prepare(model, optimizer)" in unprepared
        assert "compute the loss and its gradients before step()" in closure
