"""The optimizer makes each rank's part of a gradient orthogonal, and not the whole one."""

from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.nn.functional import all_reduce
from tp_verify import Strategy


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(24, 16), nn.Linear(16, 24)
        self.up, self.down = nn.Linear(16, 32, bias=False), nn.Linear(32, 16, bias=False)

    def forward(self, tokens):
        return self.head(self.down(F.gelu(self.up(self.embed(tokens)))))


class Muon(torch.optim.Optimizer):
    """Gradient descent along orthogonal directions, without momentum; ``cut`` has the dimension of parts."""

    def __init__(self, params, cut):
        super().__init__(params, {})
        self.cut = cut

    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            gradient, dim = parameter.grad, self.cut.get(parameter)
            if dim is not None:
                parts = [torch.empty_like(gradient) for _ in range(dist.get_world_size())]
                dist.all_gather(parts, gradient)
                gradient = torch.cat(parts, dim)
            direction = gradient / gradient.norm()
            for _ in range(5 if gradient.dim() > 1 else 0):
                direction = 1.5 * direction - 0.5 * direction @ direction.T @ direction
            if dim is not None:
                direction = direction.chunk(dist.get_world_size(), dim)[dist.get_rank()]
            parameter.sub_(0.02 * direction)


def muon(model, right):
    is_cut = right and dist.is_initialized()
    return Muon(model.parameters(), {model.up.weight: 0, model.down.weight: 1} if is_cut else {})


def step(model, batch):
    return F.cross_entropy(model(batch).flatten(0, 1), (5 * batch + 1).flatten() % 24)


class Training(Strategy):
    data = "whole"

    def parallelize(self, model):
        for layer, dim in ((model.up, 0), (model.down, 1)):
            part = layer.weight.detach().chunk(dist.get_world_size(), dim)[dist.get_rank()]
            layer.weight = nn.Parameter(part.clone())
        model.down.register_forward_hook(lambda module, inputs, y: all_reduce(y))

    def backward(self, model, step, parts):
        loss = step(model, parts[0])
        (loss / dist.get_world_size()).backward()  # the backward of all_reduce sums the ranks' shares
        for parameter in (model.embed.weight, *model.head.parameters()):
            dist.all_reduce(parameter.grad)
        return loss.detach()


def batch(seed):
    return torch.randint(24, (4, 6), generator=torch.Generator().manual_seed(seed))


def case(right):
    made = {"build": Model, "batches": [batch(0), batch(1)], "step": step}
    return made | {"parallel": Training(), "optimizer": partial(muon, right=right)}


faulty, right = partial(case, False), partial(case, True)
