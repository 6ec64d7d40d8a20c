"""Time of a training step on split sequences, beside one written by hand: python -m tests.bench.context.steps

The decoder of ``tests.bench.context.memory``, one thread in each rank. By hand: a zig-zag slice of the batch,
all-gathers of keys and values as in ``tests.bench.context.attention``, DDP, and a loss over the tokens of
all ranks. Both train the same weights in turns, and must come to the same loss. A ratio is the median over
the rounds; its range is from the first to the third quartile.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from tp_testing import run_ranks
from tp_trainer import Trainer

from tests.bench._results import Results
from tests.bench.context import attention, memory


def by_hand(tokens: int, batch: dict[str, Tensor]) -> Callable[[], float]:
    """Return a step written by hand, which returns the loss of whole sequences."""
    size, rank = dist.get_world_size(), dist.get_rank()
    chunks = torch.arange(tokens).chunk(2 * size)
    places = torch.cat([chunks[rank], chunks[-1 - rank]])
    torch.manual_seed(0)
    model = DistributedDataParallel(memory.Decoder(tokens), gradient_as_bucket_view=True)

    def attend(*parts: Tensor, is_causal: bool) -> Tensor:
        return attention.by_hand(*parts)

    def step() -> float:
        model.zero_grad()
        own = {name: tensor[:, places] for name, tensor in batch.items()}
        with (
            patch.object(memory, "attention", attend),
            patch.object(memory, "positions", lambda _: places),
        ):
            logits = model(own["tokens"])
        loss = F.cross_entropy(logits.flatten(0, 1), own["labels"].flatten())  # slices of one length
        loss.backward()
        with torch.no_grad():  # as SGD does; the open trainer watches optimizers that it has not prepared
            for parameter in model.parameters():
                parameter.sub_(parameter.grad, alpha=0.1)
        whole = loss.detach()
        dist.all_reduce(whole)
        return float(whole) / size

    return step


def by_tp(trainer: Trainer, tokens: int, batch: dict[str, Tensor]) -> Callable[[], float]:
    torch.manual_seed(0)
    plain = memory.Decoder(tokens)
    model, optimizer = trainer.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.1))

    def step() -> float:
        optimizer.zero_grad()
        output = trainer.run(memory.step, model, batch)
        trainer.backward(output["loss"])
        optimizer.step()
        return float(output["loss"].detach())

    return step


def times(tokens: int, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each round, by hand and by tp."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    ids = torch.randint(memory.VOCABULARY, (1, tokens))
    batch = {"tokens": ids, "labels": ids.roll(-1, 1)}
    with Trainer(backend="context", devices="cpu", progress=False, seed=0) as trainer:
        steps = {"tp": by_tp(trainer, tokens, batch), "by hand": by_hand(tokens, batch)}
        found: dict[str, list[float]] = {name: [] for name in steps}
        for number in range(rounds + 2):  # two to warm up: the check, and DDP's buckets
            losses = []
            for name, step in steps.items():
                dist.barrier()
                begin = time.perf_counter()
                losses.append(step())
                dist.barrier()
                if number > 1:
                    found[name].append(time.perf_counter() - begin)
            torch.testing.assert_close(losses[0], losses[1], rtol=1e-4, atol=1e-4)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=15)
    given = parser.parse_args()
    with Results("context-steps", is_part=given != parser.parse_args([])) as results:
        for ranks in given.ranks:
            for tokens in given.tokens:
                found = run_ranks(times, ranks, tokens, given.rounds)[0]
                case = f"{ranks} ranks, {tokens} tokens"
                results.add(f"{case}, by hand", 1e3 * statistics.median(found["by hand"]), "ms")
                ratios = [a / b for a, b in zip(found["tp"], found["by hand"], strict=True)]
                low, middle, high = statistics.quantiles(ratios, n=4)
                results.add(f"{case}: ratio", middle, "of by hand", note=f"{low:.3f} to {high:.3f}")


if __name__ == "__main__":
    from tests.bench.context import steps as program  # so that ranks import it by its name

    program.main()
