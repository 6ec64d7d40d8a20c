"""An optimizer whose weights to evaluate are others than those it trains is switched for each validation."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tp_trainer import Checkpoints, Limits, Trainer, Validation


class AveragingSGD(torch.optim.SGD):
    """Trains its weights, and evaluates their mean over all steps; as without a schedule, by two methods."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, lr=lr)
        self.param_groups[0] |= {"steps": 0, "is_training": True}

    @torch.no_grad()
    def step(self, closure=None):
        group = self.param_groups[0]
        assert group["is_training"], "a step with the weights to evaluate"
        loss = super().step(closure)
        group["steps"] += 1
        for p in group["params"]:
            mean = self.state[p].setdefault("mean", torch.zeros_like(p))
            mean.lerp_(p, 1 / group["steps"])
        return loss

    def train(self):
        self._switch(training=True)

    def eval(self):
        self._switch(training=False)

    @torch.no_grad()
    def _switch(self, *, training):
        group = self.param_groups[0]
        if group["is_training"] is training or not group["steps"]:
            return
        group["is_training"] = training
        for p in group["params"]:
            kept, mean = p.clone(), self.state[p]["mean"]
            p.copy_(mean)
            mean.copy_(kept)


def data():
    x = torch.randn(24, 3, generator=torch.Generator().manual_seed(5))
    return TensorDataset(x, x.sum(1, keepdim=True))


def step(model, batch):
    return (model(batch[0]) - batch[1]).square().mean()


def make():
    torch.manual_seed(1)
    model = nn.Linear(3, 1, dtype=torch.float64).float()
    return model, AveragingSGD(model.parameters(), lr=0.1)


def fit(folder=None, **changes):
    model, optimizer = make()
    loader = DataLoader(data(), batch_size=4)
    with Trainer(devices="cpu", seed=0, progress=False) as trainer:
        saved = {} if folder is None else {"checkpoint": Checkpoints(folder), "resume": "auto"}
        history = trainer.fit(
            model, optimizer, loader, step=step, validation=Validation(loader, step=step), **saved, **changes
        )
    return [record.val["loss"] for record in history.epochs], model.weight.detach().clone()


def by_hand(epochs):
    model, optimizer = make()
    losses = []
    for _ in range(epochs):
        optimizer.train()
        for batch in DataLoader(data(), batch_size=4):
            optimizer.zero_grad()
            step(model, batch).backward()
            optimizer.step()
        optimizer.eval()
        with torch.no_grad():
            losses.append(
                torch.stack([step(model, batch) for batch in DataLoader(data(), batch_size=4)]).mean()
            )
    return [loss.item() for loss in losses], model.weight.detach().clone()


def test_validations_and_the_end_of_fit_see_the_weights_to_evaluate():
    losses, weight = by_hand(3)
    found, trained = fit(epochs=3)
    assert found == pytest.approx(losses, rel=1e-6)
    assert torch.equal(trained, weight)


@pytest.mark.parametrize("steps", [4, 6, 9])
def test_a_resumed_run_goes_on_with_the_weights_to_train(tmp_path, steps):
    expected = fit(epochs=3)
    fit(tmp_path, limits=Limits(epochs=3, max_steps=steps))
    losses, weight = fit(tmp_path, epochs=3)
    assert losses == expected[0]
    assert torch.equal(weight, expected[1])
