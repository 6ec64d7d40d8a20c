"""The rates of the machine at hand, measured in about a minute: ``tp plan --calibrate``.

Ranks of this host compute and exchange together, as they do in training, where they share cores and memory.
Blocks of GPT-2 and Llama in some sizes run forward, backward and through an optimizer. A fit to each of
these passes gives the seconds of an operator's start, of a floating-point operation and of a byte. Operators
measured one by one would find their values in a cache, which those of a step do not. A round ends when the
last rank has done its work, and the fastest of some rounds counts: what else the machine does only adds.
"""

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict
from itertools import combinations
from time import perf_counter, process_time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from tp_core import LaunchEnvironment, resolve_devices
from tp_core.errors import ConfigError
from tp_core.internal import RankPool, all_gather_single, device_of_rank, reduce_scatter_single
from tp_core.sessions import join_process_group

from tp_trainer._memory import Operator, OperatorLog, measure_footprint
from tp_trainer.planning._machine import Machine

_ROUNDS = 2
_TURNS = 2
_LEAST_S = 0.04
"""The seconds of a round: long enough for ranks that share a core to take turns."""
_ROWS = 512  # of a square matrix
_SIZES = (4096, 2**23)  # bytes, of which the smaller shows the latency and the larger the rate


def calibrate(ranks: int = 2) -> Machine:
    """Measure the rates of this machine with some ranks of this host, one on each device.

    Args:
        ranks: The number of ranks, each a new process.

    Raises:
        ConfigError: There are fewer than two ranks, which exchange nothing.
        RankFailedError: A rank failed.
    """
    if ranks < 2:
        msg = f"calibrate() measures what ranks exchange, and takes two of them or more, got {ranks}"
        raise ConfigError(msg)
    with RankPool(ranks) as pool:
        return Machine(**pool.run(_measure)[0])


def _measure() -> dict[str, Any]:
    """Return the fields of a `Machine`, on each rank."""
    environment = LaunchEnvironment.read()
    device = device_of_rank(resolve_devices("auto"), environment, explicit=False)
    leave = join_process_group(environment, device=device)
    try:
        ranks = dist.get_world_size()
        matrix = torch.rand(_ROWS, _ROWS, device=device)
        together, alone = (_seconds(lambda: matrix @ matrix, device, alone=only) for only in (False, True))
        passes = _passes(device)
        turns = [
            [_exchange(run, matrix, n) for _, run in _collectives() for n in sorted({2, ranks})]
            for _ in range(_TURNS)
        ]
        fastest = iter(_fastest(turns))
        collectives = {
            kind: {str(n): _line(next(fastest), together, n) for n in sorted({2, ranks})}
            for kind, _ in _collectives()
        }
        return asdict(
            Machine(
                flops=2.0 * _ROWS**3 / together,
                bandwidth=1 / passes["update"][2],
                start_s=passes["forward"][0],
                passes=passes,
                is_ahead=device.type != "cpu",
                overlap=_overlap(matrix, device),
                crowding=max(1.0, together / alone, _ranks_for_a_core(device, ranks)),
                dtensor_s=_of_dtensors(device),
                packing_s=_of_packing(
                    device, [collectives[kind][str(ranks)][0] for kind in ("all-gather", "reduce-scatter")]
                ),
                collectives=collectives,
                source=f"measured on {ranks} ranks, {device.type}",
            )
        )
    finally:
        leave()


def _seconds(work: Callable[[], object], device: torch.device, *, alone: bool = False) -> float:
    """Return the time of work that all ranks do at once, or the first one while the others wait."""
    is_mine = dist.get_rank() == 0 or not alone

    def round_of(times: int) -> float:
        dist.barrier()
        began = perf_counter()
        for _ in range(times if is_mine else 0):
            work()
        _wait(device)
        dist.barrier()
        return perf_counter() - began

    round_of(1)
    times = 1
    while (took := _agreed(round_of(times), device)) < _LEAST_S:  # a barrier takes longer than most operators
        times = math.ceil(times * min(10.0, 1.5 * _LEAST_S / took))
    return min(took, *(round_of(times) for _ in range(_ROUNDS - 1))) / times


def _fastest(turns: list[list[list[float]]]) -> list[list[float]]:
    """Return the least of each number over the turns."""
    return [[min(times) for times in zip(*each, strict=True)] for each in zip(*turns, strict=True)]


def _agreed(seconds: float, device: torch.device) -> float:
    """Return the first rank's seconds: ranks that exchange do so as often."""
    found = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.broadcast(found, src=0)
    return float(found)


def _overlap(matrix: Tensor, device: torch.device) -> float:
    """Return the part of an all-reduce that products hide which begin with it and take as long."""
    whole = torch.zeros(_SIZES[-1] // 4, device=device)
    once, exchange = (_seconds(w, device) for w in (lambda: matrix @ matrix, lambda: dist.all_reduce(whole)))
    times = max(1, round(exchange / once))

    def both() -> None:
        work = dist.all_reduce(whole, async_op=True)
        for _ in range(times):
            matrix @ matrix
        work.wait()

    hidden = times * once + exchange - _seconds(both, device)
    return min(1.0, max(0.0, hidden / min(exchange, times * once)))


def _ranks_for_a_core(device: torch.device, ranks: int) -> float:
    """Return how many threads share a core: what else runs slows a rank alone, and hides that they do."""
    return ranks * torch.get_num_threads() / (os.cpu_count() or 1) if device.type == "cpu" else 1.0


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


class _Block(nn.Module):
    """A block of GPT-2: (batch, tokens, width) -> the same."""

    def __init__(self, width: int, heads: int = 8) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.mix(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        y: Tensor = x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))
        return y


class _GatedBlock(nn.Module):
    """A block of Llama, of as many small operators as transformers writes it with; shapes as above."""

    def __init__(self, width: int, heads: int = 8) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ParameterList(torch.ones(width) for _ in range(2))
        self.mix, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, 3 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = _normalized(x, self.norms[0])
        q, k, v = self.mix(h).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        angles = torch.arange(q.shape[-1] * q.shape[-2], device=x.device).view(q.shape[-2:]) * 1e-3
        q, k = (_rotated(t, angles.cos(), angles.sin()) for t in (q, k))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        h = _normalized(x, self.norms[1])
        y: Tensor = x + self.down(nn.functional.silu(self.gate(h)) * self.up(h))
        return y


def _normalized(x: Tensor, weight: Tensor) -> Tensor:
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-high, low], dim=-1) * sin


_BLOCKS = (
    (_Block, 64, 8, 1, 64),
    (_GatedBlock, 128, 4, 2, 128),
    (_Block, 256, 2, 2, 128),
    (_GatedBlock, 256, 2, 8, 128),
    (_Block, 384, 1, 8, 128),
    (_GatedBlock, 512, 2, 1, 128),
)
"""Kinds, widths, numbers, samples and tokens of blocks: the first have more starts, the last more work."""


def _passes(device: torch.device) -> dict[str, list[float]]:
    """Return the seconds of a start, a floating-point operation and a byte in each pass of a step."""
    more = 1 if device.type == "cpu" else 4  # what an accelerator does is hidden by starts, if it is little
    subjects, logs = [], []
    for number, (kind, width, blocks, samples, tokens) in enumerate(_BLOCKS):
        by = more if number else 1
        model = nn.Sequential(*(kind(by * width) for _ in range(blocks))).to(device)
        optimizer = torch.optim.AdamW(model.parameters())
        batch = torch.rand(samples, by * tokens, by * width, device=device)
        subjects.append((model, optimizer, batch))
        logs.append(OperatorLog())
        if dist.get_rank() == 0:  # it takes seconds where ranks share cores
            measure_footprint(model, optimizer, batch, _square, operators=logs[-1])
    # In turns, so that what else a machine does for a second does not fall on the same blocks twice.
    turns = [[_seconds_of_passes(*subject, device) for subject in subjects] for _ in range(_TURNS)]
    fastest = _fastest(turns)
    seconds = {
        "forward": [forward for forward, _, _ in fastest],
        "backward": [both - forward for forward, both, _ in fastest],
        "update": [update for _, _, update in fastest],
    }
    found = [{name: _fit([_work(getattr(log, name)) for log in logs], seconds[name]) for name in seconds}]
    dist.broadcast_object_list(found, src=0, device=device)
    return found[0]


def _seconds_of_passes(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor, device: torch.device
) -> list[float]:
    """Return the seconds of forward, of forward and backward, and of the update."""

    def train() -> None:
        optimizer.zero_grad()
        _square(model, batch).backward()

    forward, both = _seconds(lambda: _square(model, batch), device), _seconds(train, device)
    return [forward, both, _seconds(lambda: optimizer.step(), device)]  # noqa: PLW0108 - it returns a value


def _work(operators: list[Operator]) -> list[float]:
    """Return the starts, floating-point operations and bytes of a pass."""
    moved = sum(o.nbytes for o in operators if not o.flops)
    return [len(operators), sum(o.flops for o in operators), moved]


def _fit(work: list[list[float]], seconds: list[float]) -> list[float]:
    """Return the seconds of each kind of work, none negative: the least squares of relative errors.

    Example:
        >>> [round(x, 6) for x in _fit([[8, 1, 2], [4, 8, 1], [2, 1, 16], [1, 2, 4]], [8.25, 6, 33.25, 9])]
        [0.5, 0.25, 2.0]
        >>> _fit([[8, 1, 2], [4, 8, 1], [2, 1, 16]], [8, 4, 1])[2]  # more bytes, less time
        0.0
    """
    rows = torch.tensor(work, dtype=torch.float64) / torch.tensor(seconds, dtype=torch.float64)[:, None]
    best, least = [0.0] * rows.shape[1], math.inf
    kinds = [kind for kind in range(rows.shape[1]) if rows[:, kind].any()]
    for count in range(1, len(kinds) + 1):
        for chosen in combinations(kinds, count):
            some, ones = rows[:, chosen], torch.ones(len(rows), 1, dtype=torch.float64)
            found = torch.linalg.lstsq(some, ones).solution
            error = float((some @ found - ones).square().sum())
            if error < least and bool((found > 0).all()):
                least = error
                best = [0.0] * rows.shape[1]
                for kind, each in zip(chosen, found.flatten().tolist(), strict=True):
                    best[kind] = each
    return best


def _square(model: Any, x: Any) -> Tensor:
    loss: Tensor = model(x).square().mean()
    return loss


def _of_dtensors(device: torch.device) -> float:
    """Return the seconds that an operator of an optimizer takes longer on parameters that are DTensors."""
    from torch.distributed.fsdp import fully_shard  # half a second, for a calibration alone

    plain, split = (
        nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8))).to(device) for _ in range(2)
    )
    fully_shard(split)
    log = OperatorLog()
    measure_footprint(plain, torch.optim.AdamW(plain.parameters()), operators=log)
    seconds = []
    for model in (plain, split):
        optimizer = torch.optim.AdamW(model.parameters())
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        seconds.append(_seconds(lambda: optimizer.step(), device))  # noqa: B023, PLW0108 - it returns a value
    return max(0.0, seconds[1] - seconds[0]) / max(1, len(log.update))


def _of_packing(device: torch.device, latencies: list[float]) -> float:
    """Return the seconds of the host to pack the tensors of a small unit for a collective and back.

    Args:
        device: The device.
        latencies: The latencies of the two collectives of a unit in a step, which are not part of it.
    """
    from torch.distributed.fsdp import fully_shard

    plain, split = (nn.Sequential(*(nn.Linear(64, 64) for _ in range(8))).to(device) for _ in range(2))
    for module in (*split, split):
        fully_shard(module, reshard_after_forward=False)
    batch = torch.rand(8, 64, device=device)
    seconds = [
        _seconds(lambda: _square(model, batch).backward(), device)  # noqa: B023 - it is called in its round
        for model in (plain, split)
    ]
    return max(0.0, (seconds[1] - seconds[0]) / len(split) - sum(latencies)) / len(latencies)


# -- Collectives ------------------------------------------------------------------------------------


_Run = Callable[[Tensor, dist.ProcessGroup], object]


def _collectives() -> Iterator[tuple[str, _Run]]:
    """Yield each kind with a function of the whole tensor."""
    yield "all-reduce", lambda t, group: dist.all_reduce(t, group=group)
    yield "all-gather", _gather
    yield "reduce-scatter", _scatter
    yield "all-to-all", lambda t, group: dist.all_to_all_single(torch.empty_like(t), t, group=group)
    yield "send", _pass_on


def _gather(whole: Tensor, group: dist.ProcessGroup) -> None:
    all_gather_single(whole, whole.chunk(dist.get_world_size(group))[0].clone(), group=group)


def _scatter(whole: Tensor, group: dist.ProcessGroup) -> None:
    part = torch.empty_like(whole.chunk(dist.get_world_size(group))[0])
    reduce_scatter_single(part, whole, group=group)


def _pass_on(whole: Tensor, group: dist.ProcessGroup) -> None:
    me, ranks = dist.get_rank(group), dist.get_world_size(group)
    received = torch.empty_like(whole)
    work = [
        dist.P2POp(dist.isend, whole, group=group, group_peer=(me + 1) % ranks),
        dist.P2POp(dist.irecv, received, group=group, group_peer=(me - 1) % ranks),
    ]
    for each in dist.batch_isend_irecv(work):
        each.wait()


def _exchange(run: _Run, matrix: Tensor, ranks: int) -> list[float]:
    """Return the seconds of a product and a small exchange, of one and a large one, and the busy cores.

    All groups of neighbors exchange at once; ranks that are left over wait. A product comes before each
    exchange, as in a step: ranks that share cores end it one after the other, for which all others wait.
    """
    world, me, device = dist.get_world_size(), dist.get_rank(), matrix.device
    mine = None
    for first in range(0, world - ranks + 1, ranks):  # every rank makes every group, in one order
        group = dist.new_group(list(range(first, first + ranks)))
        mine = group if first <= me < first + ranks else mine

    def exchange() -> None:
        if mine is not None:
            run(whole, mine)

    def compute_first() -> None:
        matrix @ matrix
        exchange()

    found = []
    for nbytes in _sizes(ranks):
        whole = torch.zeros(nbytes // 4, device=device)
        found.append(_seconds(compute_first, device))
    began, computed = perf_counter(), process_time()
    _seconds(exchange, device)
    busy = (process_time() - computed) / (perf_counter() - began)
    return [*found, busy * world / (os.cpu_count() or 1) if device.type == "cpu" else 0.0]


def _sizes(ranks: int) -> list[int]:
    """Return the bytes of a small and a large tensor that ranks can share in equal parts."""
    return [size // 4 // ranks * ranks * 4 for size in _SIZES]


def _line(measured: list[float], product_s: float, ranks: int) -> list[float]:
    """Return the latency, the seconds for each byte and the part of the cores of what `_exchange` returns.

    Args:
        measured: What it returns.
        product_s: The seconds of the product.
        ranks: The number of ranks that exchange.
    """
    first_s, last_s, busy = measured
    low, high = _sizes(ranks)
    per_byte = max(0.0, (last_s - first_s) / (high - low))
    return [max(0.0, first_s - product_s - low * per_byte), per_byte, min(1.0, busy)]
