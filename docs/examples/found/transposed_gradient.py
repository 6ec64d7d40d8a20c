"""torch 2.13: all_gather of torch.distributed.nn gives mixed up gradients, where one comes transposed.

    pip install torch
    torchrun --nproc-per-node 2 transposed_gradient.py

Ranks multiply what they gathered with the same weights, once as it is, and once transposed. The gradient is
the sum of the weights in both. Over gloo, the second one has the right elements in wrong places: the buffers
of the backward pass have the transposed strides, and are filled as if they had not.
"""

import torch
import torch.distributed as dist
from torch.distributed.nn.functional import all_gather


def largest_error(*, transposed):
    x = torch.ones(4, 3, requires_grad=True)
    weights = [torch.arange(12.0).view(4, 3) * (rank + 1) for rank in range(dist.get_world_size())]
    loss = 0.0
    for part, weight in zip(all_gather(x), weights, strict=True):
        loss = loss + ((part.T * weight.T.contiguous()).sum() if transposed else (part * weight).sum())
    loss.backward()
    expected = dist.get_world_size() * weights[dist.get_rank()]
    return float((x.grad - expected).abs().max())


if __name__ == "__main__":
    dist.init_process_group("gloo")
    for transposed in (False, True):
        error = largest_error(transposed=transposed)
        if dist.get_rank() == 0:
            print(f"transposed={transposed}: the largest error of the gradient is {error:g}")
    dist.destroy_process_group()
