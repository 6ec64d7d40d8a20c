"""A loader that ends inside of another's loop ends the other's accumulation, too: weights step too early."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader
from tp_verify import strategies

ROWS = torch.randint(24, (16, 6), generator=torch.Generator().manual_seed(0))


def build():
    return nn.Sequential(nn.Embedding(24, 16), nn.Linear(16, 24))


def step(model, batch):
    return F.cross_entropy(model(batch).flatten(0, 1), (5 * batch + 1).flatten() % 24)


class Validated(strategies.Accelerate):
    """Accumulates four batches of the loader, and looks at others after the second."""

    def prepare(self, model, make):
        model, self.optimizer = super().prepare(model, make)
        loaders = DataLoader(ROWS, batch_size=1), DataLoader(ROWS, batch_size=8)
        loader, self.others = self._accelerator.prepare(*loaders)
        self.loader = iter(loader)
        return model, self.optimizer

    def share(self, batch):
        return batch[dist.get_rank() :: dist.get_world_size()]

    def backward(self, model, step, parts):
        mean = 0.0
        for number in range(len(parts)):
            if number:
                self.update(model, self.optimizer)
            with self._accelerator.accumulate(model):
                loss = step(model, next(self.loader))
                self._accelerator.backward(loss)
            mean += loss.detach() / len(parts)
            if number == 1:
                self.validate(model, step)
        return mean

    def validate(self, model, step):
        model.eval()
        with torch.no_grad():
            losses = [step(model, batch) for batch in self.others]
        model.train()
        return sum(losses) / len(losses)


def cases():
    parallel = Validated(gradient_accumulation_steps=4)
    case = {"build": build, "batches": [*ROWS.split(8)], "step": step, "parallel": parallel}
    return case | {"micro": 4, "vary": False}
