"""Time of attention on split sequences, by each way: python -m tests.bench.context.attention

Forward and backward of causal attention in float32, on gloo, beside keys and values gathered by hand:
an all-gather, torch's function for the two chunks of a rank, an all-reduce of the gradients. All take
turns; a ratio is the median over the rounds. The last figures are of the cost model: in how many rows its
choice is the fastest, or takes at most a tenth more.
"""

import argparse
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from tp_context import attention

# private: ways without a model, and what the option "auto" chooses
from tp_context._algorithms import Size, costs
from tp_testing import run_ranks

from tests.bench._results import Results
from tests.tp_context.cuts import activate, cuts_of

WAYS = ("all-gather", "ulysses", "ring")
FEATURES = 32
HEADS = ((4, 4), (8, 2))


class _GatherSlices(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor) -> Tensor:
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, part.contiguous())
        early, late = zip(*(p.chunk(2, 2) for p in parts), strict=True)
        return torch.cat([*early, *reversed(late)], 2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        grad = grad.contiguous()
        dist.all_reduce(grad)
        rank, chunks = dist.get_rank(), grad.chunk(2 * dist.get_world_size(), 2)
        return torch.cat([chunks[rank], chunks[-1 - rank]], 2)


def by_hand(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    key, value = _GatherSlices.apply(key), _GatherSlices.apply(value)
    size, rank, outputs = dist.get_world_size(), dist.get_rank(), []
    each = query.size(2) // 2
    for at, chunk in enumerate((rank, 2 * size - 1 - rank)):
        rows, end = query[:, :, at * each : (at + 1) * each], (chunk + 1) * each
        mask = torch.ones(each, end, dtype=torch.bool).tril(end - each)
        outputs.append(
            F.scaled_dot_product_attention(rows, key[:, :, :end], value[:, :, :end], mask, enable_gqa=True)
        )
    return torch.cat(outputs, 2)


def times(tokens: int, heads: int, key_heads: int, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each round by way."""
    dist.init_process_group("gloo")
    size, rank = dist.get_world_size(), dist.get_rank()
    generator = torch.Generator().manual_seed(rank)
    cuts = {way: cuts_of(tokens, rank=rank, size=size, algorithm=way) for way in WAYS}
    own = cuts[WAYS[0]].of_whole(tokens).tokens
    shapes = [(1, n, own, FEATURES) for n in (heads, key_heads, key_heads)]
    inputs = [torch.randn(s, generator=generator, requires_grad=True) for s in shapes]
    grad = torch.randn(shapes[0], generator=generator)
    found: dict[str, list[float]] = {way: [] for way in ("by hand", *WAYS)}
    for number in range(rounds + 1):
        for way, seconds in found.items():
            dist.barrier()
            begin = time.perf_counter()
            if way == "by hand":
                mixed = by_hand(*inputs)
            else:
                with activate(cuts[way]):
                    mixed = attention(*inputs, is_causal=True, enable_gqa=True)
            torch.autograd.grad(mixed, inputs, grad)
            dist.barrier()
            if number:  # the first one warms up
                seconds.append(time.perf_counter() - begin)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    with Results("context-attention", is_part=arguments != parser.parse_args([])) as results:
        near = rows = 0
        for ranks in arguments.ranks:
            for tokens in arguments.tokens:
                for heads, key_heads in HEADS:
                    found = run_ranks(times, ranks, tokens, heads, key_heads, arguments.rounds)[0]
                    case = f"{ranks} ranks, {tokens} tokens, {heads} heads of {key_heads}"
                    whole = found["by hand"]
                    results.add(f"{case}, by hand", 1e3 * statistics.median(whole), "ms")
                    ratios = {
                        way: statistics.median(a / b for a, b in zip(found[way], whole, strict=True))
                        for way in WAYS
                    }
                    model = costs(Size(1, heads, key_heads, FEATURES, tokens, ranks))
                    choice = min(model, key=model.__getitem__)
                    for way, ratio in ratios.items():
                        results.add(
                            f"{case}, {way}: ratio", ratio, "of by hand", note="chosen" * (way == choice)
                        )
                    rows += 1
                    near += ratios[choice] <= 1.1 * min(ratios.values())
        results.add("choices of the cost model within a tenth of the fastest", near / rows, "of the rows")


if __name__ == "__main__":
    from tests.bench.context import attention as program  # so that ranks import it by its name

    program.main()
