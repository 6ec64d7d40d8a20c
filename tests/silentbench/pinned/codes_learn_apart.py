"""The codebook's own optimizer steps by each rank's gradient: ranks have other codes after one step."""

import torch
import torch.distributed as dist
from vector_quantize_pytorch import VectorQuantize


def shown():
    torch.manual_seed(0)
    model = VectorQuantize(
        dim=2,
        codebook_size=2,
        learnable_codebook=True,
        ema_update=False,
        in_place_codebook_optimizer=lambda weights: torch.optim.SGD(weights, lr=0.1),
    )
    with torch.no_grad():
        model._codebook.embed.copy_(torch.tensor([[[0.0, 0.0], [10.0, 10.0]]]))
    model.train()
    model(torch.tensor([[[1.0, 1.0], [9.0, 9.0]]]) - dist.get_rank())
    return [round(value, 3) for value in model._codebook.embed.flatten().tolist()]
