"""Learn features that tell identities apart, with class centers that are split over ranks.

The images are the scans of handwritten digits that ship inside scikit-learn, real ones of 8 x 8 pixels.
An identity is a digit, 2 to 7, turned by 0, 90, 180 or 270 degrees: 24 of them. A small network is trained
with ArcFace's margin on three quarters of the scans. Then one scan of each identity is enrolled, drawn from
the quarter that was never seen, and all others of that quarter have to find theirs by the cosine of features.

    python docs/examples/identities.py
    torchrun --nproc-per-node 2 docs/examples/identities.py --sample-rate 0.3

Each rank brings images of its own and has a copy of the network; their features are gathered, and each
rank compares all of them with its part of the centers.
"""

import argparse
from collections.abc import Sequence

import torch
import tp_shard as ts
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

FEATURES = 64
DIGITS, TURNS = range(2, 8), 4  # the others look alike when turned: 0, 1, 8, and 9 like a 6
IDENTITIES = len(DIGITS) * TURNS


def load_identities() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return images of shape (n, 1, 8, 8) with their identities, to train with and to test with."""
    digits = load_digits()
    scans = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    chosen = (labels >= DIGITS.start) & (labels < DIGITS.stop)
    scans, labels = scans[chosen], labels[chosen] - DIGITS.start
    order = torch.randperm(len(scans), generator=torch.Generator().manual_seed(0))
    parts = []
    for part in order.tensor_split([3 * len(order) // 4]):
        images = torch.cat([scans[part].rot90(turn, (2, 3)) for turn in range(TURNS)])
        identities = torch.cat([labels[part] * TURNS + turn for turn in range(TURNS)])
        parts.append((images, identities))
    return parts[0], parts[1]


def make_network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),  # (batch, 64, 8, 8)
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, FEATURES),
        nn.BatchNorm1d(FEATURES),
    )


@torch.no_grad()
def retrieval_accuracy(network: nn.Module, images: Tensor, identities: Tensor, draws: int = 20) -> float:
    """Return the share of images that find their identity among one enrolled image of each."""
    network.eval()
    features = F.normalize(network(images))
    network.train()
    generator = torch.Generator().manual_seed(0)
    members = [(identities == identity).nonzero().squeeze(1) for identity in range(IDENTITIES)]
    right = []
    for _ in range(draws):
        enrolled = torch.stack([m[torch.randint(len(m), (), generator=generator)] for m in members])
        found = (features @ features[enrolled].t()).argmax(1)
        others = torch.ones(len(images), dtype=torch.bool).index_fill_(0, enrolled, False)
        right.append((found == identities)[others].float().mean())
    return torch.stack(right).mean().item()


def train(options: argparse.Namespace) -> tuple[float, float]:
    """Train; return the retrieval accuracy on images that were not seen, before and after."""
    ranks, rank = ts.distributed.get_world_size(), ts.distributed.get_rank()
    (images, identities), unseen = load_identities()
    torch.manual_seed(0)
    network = make_network()
    before = retrieval_accuracy(network, *unseen)
    wrapped = DistributedDataParallel(network) if ranks > 1 else network
    head = ts.nn.MarginCrossEntropy(FEATURES, IDENTITIES, m2=0.3, scale=16.0, sample_rate=options.sample_rate)
    parameters = [*network.parameters(), *head.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=options.steps)
    order = torch.Generator().manual_seed(1)
    for step in range(options.steps):
        chosen = torch.randint(len(images), (options.batch,), generator=order)
        mine = chosen.tensor_split(ranks)[rank]
        features = wrapped(images[mine])
        # All ranks go on with the features of all.
        features = ts.distributed.gather_batch(features, size=options.batch)
        loss = head(features, identities[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if rank == 0 and (step + 1) % 50 == 0:
            print(f"step {step + 1:>4}  loss {loss.item():.3f}", flush=True)
    return before, retrieval_accuracy(network, *unseen)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--batch", type=int, default=128, help="over all ranks")
    parser.add_argument("--sample-rate", type=float, default=1.0, help="of the other centers, in each step")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    ts.distributed.init_process_group()
    before, after = train(options)
    if ts.distributed.get_rank() == 0:
        print(f"retrieval accuracy: {before:.3f} before training, {after:.3f} after")
    ts.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
