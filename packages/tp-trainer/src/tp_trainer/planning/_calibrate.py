"""The rates of the machine at hand, measured in less than a minute: ``tp plan --calibrate``.

Ranks of this host compute and exchange together, as they do in training, where they share cores and memory.
Two blocks of a transformer, run forward, backward and through an optimizer, say what each of these passes
reaches of the rates of single operators. A round ends when the last rank has done its work, and the fastest
of some rounds counts: what else the machine does only adds.
"""

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from tp_core import LaunchEnvironment, resolve_devices
from tp_core.errors import ConfigError
from tp_core.internal import device_of_rank
from tp_core.sessions import join_process_group

from tp_trainer._launch._function import launch
from tp_trainer._memory._footprint import measure_footprint
from tp_trainer._memory._operators import OperatorLog
from tp_trainer.planning._machine import Machine, Operators

_ROUNDS = 5
_LEAST_S = 0.04
"""The seconds of a round: long enough for ranks that share a core to take turns."""
_WIDTH = 512
_SIZES = (4096, 2**20, 2**23)  # bytes, of which the smallest shows the latency and the largest the rate


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
    return Machine(**launch(_measure, ranks)[0])


def _measure() -> dict[str, Any]:
    """Return the fields of a `Machine`, on each rank."""
    environment = LaunchEnvironment.read()
    device = device_of_rank(resolve_devices("auto"), environment, explicit=False)
    leave = join_process_group(environment, device=device)
    try:
        ranks = dist.get_world_size()
        matrix = torch.rand(768, 768, device=device)
        wide = torch.rand(2**22, device=device)
        tiny = torch.rand(8, device=device)
        together, alone = (_seconds(lambda: matrix @ matrix, device, alone=way) for way in (False, True))
        found = Machine(
            flops=2 * 768**3 / together,
            bandwidth=2 * wide.nbytes / _seconds(lambda: wide + 1.0, device),
            start_s=_seconds(lambda: tiny + 1.0, device),
            is_ahead=device.type != "cpu",
            overlap=0.0 if device.type == "cpu" else 0.9,  # gloo takes the cores that compute
            crowding=max(1.0, together / alone, _ranks_for_a_core(device, ranks)),
            collectives={
                kind: {str(n): _line(run, device, n) for n in sorted({2, ranks})}
                for kind, run in _collectives()
            },
            source=f"measured on {ranks} ranks, {device.type}",
        )
        return asdict(replace(found, slower=_of_blocks(found, device)))
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
    counts = torch.tensor(math.ceil(_LEAST_S / round_of(1)), device=device)
    dist.broadcast(counts, src=0)  # ranks that exchange do so as often
    return min(round_of(int(counts)) for _ in range(_ROUNDS)) / int(counts)


def _ranks_for_a_core(device: torch.device, ranks: int) -> float:
    """Return how many threads share a core: what else runs slows a rank alone, and hides that they do."""
    return ranks * torch.get_num_threads() / (os.cpu_count() or 1) if device.type == "cpu" else 1.0


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


class _Block(nn.Module):
    """A block of a transformer: (batch, tokens, width) -> the same."""

    def __init__(self, width: int = _WIDTH, heads: int = 8) -> None:
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


def _of_blocks(machine: Machine, device: torch.device) -> dict[str, float]:
    """Return how many times as long as by single operators each pass of two blocks takes."""
    model = nn.Sequential(_Block(), _Block()).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.rand(2, 128, _WIDTH, device=device)

    def step(model: Any, x: Any) -> Tensor:
        loss: Tensor = model(x).square().mean()
        return loss

    log = OperatorLog()
    measure_footprint(model, optimizer, batch, step, operators=log)
    forward = _seconds(lambda: step(model, batch), device)

    def train() -> None:
        optimizer.zero_grad()
        step(model, batch).backward()

    both = _seconds(train, device)
    measured = {
        "forward": forward,
        "backward": both - forward,
        "update": _seconds(lambda: optimizer.step(), device),  # noqa: PLW0108 - it returns a value
    }
    return {name: measured[name] / machine.seconds_of(Operators.of(getattr(log, name))) for name in measured}


# -- Collectives ------------------------------------------------------------------------------------


_Run = Callable[[Tensor, dist.ProcessGroup], object]


def _collectives() -> Iterator[tuple[str, _Run]]:
    """Yield each kind with a function of the whole tensor."""
    yield "all-reduce", lambda t, group: dist.all_reduce(t, group=group)
    yield "all-gather", _gather
    yield "reduce-scatter", _scatter
    yield "send", _pass_on


def _gather(whole: Tensor, group: dist.ProcessGroup) -> None:
    # torch 2.13 deprecates the only name that 2.11 has.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(whole, whole.chunk(dist.get_world_size(group))[0].clone(), group=group)


def _scatter(whole: Tensor, group: dist.ProcessGroup) -> None:
    part = torch.empty_like(whole.chunk(dist.get_world_size(group))[0])
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    scatter(part, whole, group=group)


def _pass_on(whole: Tensor, group: dist.ProcessGroup) -> None:
    me, ranks = dist.get_rank(group), dist.get_world_size(group)
    received = torch.empty_like(whole)
    work = [
        dist.P2POp(dist.isend, whole, group=group, group_peer=(me + 1) % ranks),
        dist.P2POp(dist.irecv, received, group=group, group_peer=(me - 1) % ranks),
    ]
    for each in dist.batch_isend_irecv(work):
        each.wait()


def _line(run: _Run, device: torch.device, ranks: int) -> list[float]:
    """Return the latency and the seconds for each byte of a collective among ``ranks`` neighbors.

    All groups of neighbors exchange at once; ranks that are left over wait.
    """
    world, me = dist.get_world_size(), dist.get_rank()
    mine = None
    for first in range(0, world - ranks + 1, ranks):  # every rank makes every group, in one order
        group = dist.new_group(list(range(first, first + ranks)))
        mine = group if first <= me < first + ranks else mine
    points = []
    for size in _SIZES:
        whole = torch.zeros(size // 4 // ranks * ranks, device=device)
        seconds = _seconds(lambda: run(whole, mine) if mine is not None else None, device)  # noqa: B023
        points.append((whole.nbytes, seconds))
    (low, first_s), *_, (high, last_s) = points
    per_byte = max(0.0, (last_s - first_s) / (high - low))
    return [max(0.0, first_s - low * per_byte), per_byte]
