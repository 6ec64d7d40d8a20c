"""Ignite's step gives back the loss divided by the micro-batches: what is logged is a quarter of it."""

import torch
import torch.nn.functional as F
from torch import nn
from tp_verify import strategies


def build():
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1))


def step(model, batch):
    return F.mse_loss(model(batch["x"]), batch["y"])


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


class Engine(strategies.DDP):
    """Ignite's trainer runs the micro-batches and the optimizer; the mean of its outputs is logged."""

    def prepare(self, model, make):
        model, self.optimizer = super().prepare(model, make)
        return model, self.optimizer

    def backward(self, model, step, parts):
        from ignite.engine import Events, create_supervised_trainer

        options = {"gradient_accumulation_steps": len(parts)}
        trainer = create_supervised_trainer(model, self.optimizer, F.mse_loss, **options)
        losses = []
        trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: losses.append(trainer.state.output))
        trainer.run([(part["x"], part["y"]) for part in parts])
        return torch.tensor(losses, dtype=torch.float64).mean()

    def update(self, model, optimizer):
        pass


def batch(seed):
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(seed))
    return {"x": x, "y": x.sum(1, keepdim=True)}


def cases():
    case = {"build": build, "batches": [batch(0), batch(1)], "step": step, "micro": 4, "optimizer": sgd}
    return case | {"parallel": Engine()}
