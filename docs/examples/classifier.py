"""A classifier whose number of classes grows, with its head split over ranks.

    torchrun --nproc-per-node 2 docs/examples/classifier.py

For each number of classes it trains a head that is split over all ranks, then on rank 0 alone the
same head in one piece, and prints the memory that a training step needs on each rank and how long
it takes. The losses are compared on the way: they are the same numbers.
"""

import argparse
import functools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import tp_shard as ts
from torch import Tensor, nn
from tp_shard.nn.functional import parallel_cross_entropy


@dataclass(frozen=True)
class Cost:
    """What training steps came to.

    Attributes:
        mebibytes: The most memory that was held at once, above what was held before.
        seconds: The median time of a step, the first one left out.
        losses: The losses of the steps.
    """

    mebibytes: float
    seconds: float
    losses: list[float]


def held() -> float:
    """Return the memory of this process in MiB, and begin to look for its peak anew."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(field: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) / 1024
    return 0.0


def measure(
    make_head: Callable[[], nn.Module],
    loss_of: Callable[[Tensor, Tensor], Tensor],
    *,
    classes: int,
    features: int,
    batch: int,
    steps: int,
) -> Cost:
    generator = torch.Generator().manual_seed(1)
    before = held()
    torch.manual_seed(0)
    head = make_head()
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    losses, times = [], []
    for _ in range(steps):
        x = torch.randn(batch, features, generator=generator)
        target = torch.randint(classes, (batch,), generator=generator)
        began = time.perf_counter()
        loss = loss_of(head(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        times.append(time.perf_counter() - began)
        losses.append(loss.item())
    return Cost(_status("VmHWM") - before, statistics.median(times[1:] or times), losses)


def compare(classes: int, *, features: int, batch: int, steps: int) -> tuple[Cost, Cost | None]:
    """Measure the split head on all ranks, and the whole one on rank 0; others get ``None``."""
    settings = {"classes": classes, "features": features, "batch": batch, "steps": steps}
    split = measure(
        lambda: ts.nn.ParallelLinear(features, classes, dim=-1),
        functools.partial(parallel_cross_entropy, num_classes=classes, inplace=True),
        **settings,
    )
    whole = None
    if not dist.is_initialized() or dist.get_rank() == 0:
        whole = measure(lambda: nn.Linear(features, classes), nn.functional.cross_entropy, **settings)
        torch.testing.assert_close(split.losses, whole.losses, rtol=1e-4, atol=1e-4)
    if dist.is_initialized():
        dist.barrier()
    return split, whole


def draw(counts: Sequence[int], costs: Sequence[tuple[Cost, Cost]], ranks: int, path: Path) -> None:
    import matplotlib as mpl

    mpl.use("agg")  # no display is needed
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
    for axis, value, title in [
        (axes[0], lambda c: c.mebibytes, "MiB on each rank"),
        (axes[1], lambda c: c.seconds * 1000, "ms for a step"),
    ]:
        axis.plot(counts, [value(split) for split, _ in costs], "o-", label=f"split over {ranks} ranks")
        axis.plot(counts, [value(whole) for _, whole in costs], "s--", label="in one piece")
        axis.set(xscale="log", yscale="log", xlabel="classes", title=title)
        axis.legend()
    figure.savefig(path, dpi=120)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--classes", type=int, nargs="+", default=[1_000, 10_000, 100_003, 1_000_000])
    parser.add_argument("--features", type=int, default=256)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--out", type=Path, default=Path("classifier.png"))
    options = parser.parse_args(arguments)

    torch.set_num_threads(1)
    ts.distributed.init_process_group()
    ranks, is_main = ts.distributed.get_world_size(), ts.distributed.get_rank() == 0
    if is_main:
        print(f"{'classes':>9}  {'MiB split':>9}  {'whole':>8}  {'ms split':>9}  {'whole':>8}  of the time")
    # What is loaded only once is not part of any head's memory.
    compare(64, features=options.features, batch=options.batch, steps=1)
    costs = []
    for count in options.classes:
        split, whole = compare(count, features=options.features, batch=options.batch, steps=options.steps)
        if whole is not None:
            costs.append((split, whole))
            print(
                f"{count:>9,}  {split.mebibytes:>9.0f}  {whole.mebibytes:>8.0f}  "
                f"{split.seconds * 1e3:>9.1f}  {whole.seconds * 1e3:>8.1f}  "
                f"{split.seconds / whole.seconds:>11.2f}",
                flush=True,
            )
    if is_main:
        draw(options.classes, costs, ranks, options.out)
        print(f"drawn: {options.out}")
    ts.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
