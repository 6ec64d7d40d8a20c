"""The codebook's own optimizer steps by each rank's gradient: ranks have other codes after one step."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from tp_verify import Strategy


def codes_optimizer(codes):
    return torch.optim.SGD(codes, lr=1.0)


class Quantized(nn.Module):
    def __init__(self):
        super().__init__()
        from vector_quantize_pytorch import VectorQuantize

        options = {"learnable_codebook": True, "ema_update": False, "rotation_trick": False}
        options["in_place_codebook_optimizer"] = codes_optimizer
        self.embed, self.head = nn.Embedding(24, 8), nn.Linear(8, 24)
        self.codes = VectorQuantize(dim=8, codebook_size=16, sync_codebook=dist.is_initialized(), **options)

    def forward(self, tokens):
        # In float32 on one device, too: the older version takes no other type.
        quantized, _, distance = self.codes.float()(self.embed(tokens).float())
        return self.head(quantized.to(self.head.weight.dtype)), distance


def step(model, batch):
    scores, distance = model(batch)
    return F.cross_entropy(scores.flatten(0, 1), (5 * batch + 1).flatten() % 24) + distance.sum()


def optimizer(model):
    return torch.optim.SGD([*model.embed.parameters(), *model.head.parameters()], lr=0.5)


class Reduced(Strategy):
    """Means of gradients, without DDP, which takes none within the forward pass, where codes are updated."""

    def parallelize(self, model):
        return model

    def backward(self, model, step, parts):
        loss = step(model, parts[0])
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        return loss.detach()


def cases():
    numbers = torch.Generator().manual_seed(0)
    batches = [torch.randint(24, (8, 6), generator=numbers) for _ in range(2)]
    case = {"build": Quantized, "batches": batches, "step": step, "optimizer": optimizer}
    return case | {"parallel": Reduced(), "dtype": torch.float32}
