"""Without a seed, each rank shuffles the shards by its own: some are read twice, others never.

Later versions refuse to, and ask for a seed.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from datasets import IterableDataset
from datasets.distributed import split_dataset_by_node
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from tp_verify import Strategy


def build():
    return nn.Sequential(nn.Embedding(24, 16), nn.Linear(16, 24))


def step(model, batch):
    return F.cross_entropy(model(batch).flatten(0, 1), (5 * batch + 1).flatten() % 24)


def read(shards):
    for row in shards:
        yield {"row": row}


class Streamed(Strategy):
    """Each batch is an epoch over as many shards as it has rows; a rank trains on those that it reads."""

    name, data = "datasets", "whole"
    reorders = True

    def __init__(self, seed):
        super().__init__()
        self.shuffled_by = seed

    def parallelize(self, model):
        return DistributedDataParallel(model)

    def backward(self, model, step, parts):
        rank, ranks = dist.get_rank(), dist.get_world_size()
        data = IterableDataset.from_generator(read, gen_kwargs={"shards": parts[0].tolist()})
        data = data.shuffle(seed=self.shuffled_by, buffer_size=1)
        data = split_dataset_by_node(data, rank=rank, world_size=ranks)
        loss = step(model, torch.tensor([one["row"] for one in data]))
        loss.backward()
        mean = loss.detach() / ranks
        dist.all_reduce(mean)
        return mean


def cases():
    numbers = torch.Generator().manual_seed(0)
    # That the ranks' own seeds agree by chance happens once in 12,870.
    batches = [torch.randint(24, (16, 6), generator=numbers) for _ in range(2)]
    case = {"build": build, "batches": batches, "step": step}
    return [case | {"parallel": Streamed(seed)} for seed in (None, 0)]
