"""The rates of the machine at hand, measured in less than a minute: ``tp plan --calibrate``.

Ranks of this host compute and exchange together, as they do in training. One block of a transformer, run
forward and backward, says what training reaches of the rates of single operators.
"""

from collections.abc import Callable, Iterator
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

_REPEATS = 7
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
        flops = 2 * 768**3 / _seconds(lambda: matrix @ matrix, device)
        bandwidth = 2 * wide.nbytes / _seconds(lambda: wide + 1.0, device)
        alone = _alone(lambda: matrix @ matrix, device)
        start_s = _seconds(lambda: [tiny + 1.0 for _ in range(200)], device) / 200
        found = Machine(
            flops=flops,
            bandwidth=bandwidth,
            start_s=start_s,
            is_ahead=device.type != "cpu",
            overlap=0.0 if device.type == "cpu" else 0.9,  # gloo takes the cores that compute
            crowding=max(1.0, 2 * 768**3 / alone / flops),
        )
        reached = _of_a_block(found, device)
        return {
            "flops": flops * reached,
            "bandwidth": bandwidth * reached,
            "start_s": start_s / reached,
            "is_ahead": found.is_ahead,
            "overlap": found.overlap,
            "crowding": found.crowding,
            "collectives": {
                kind: {str(n): _line(run, device, n) for n in sorted({2, ranks})}
                for kind, run in _collectives()
            },
            "source": f"measured on {ranks} ranks, {device.type}",
        }
    finally:
        leave()


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """Return the median of a few times, of all ranks at once."""
    times = []
    for _ in range(_REPEATS):
        dist.barrier()
        began = perf_counter()
        work()
        _wait(device)
        times.append(perf_counter() - began)
    return torch.tensor(times[1:], dtype=torch.float64).median().item()


def _alone(work: Callable[[], object], device: torch.device) -> float:
    """Return the time of work on the first rank, while the others wait."""
    times = [0.0]
    if dist.get_rank() == 0:
        for _ in range(_REPEATS):
            began = perf_counter()
            work()
            _wait(device)
            times.append(perf_counter() - began)
    dist.barrier()
    found = torch.tensor(times[1:] or times, device=device).median()
    dist.broadcast(found, src=0)
    return float(found)


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


class _Block(nn.Module):
    """A block of a transformer: (batch, tokens, width) -> the same."""

    def __init__(self, width: int = 256, heads: int = 4) -> None:
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


def _of_a_block(machine: Machine, device: torch.device) -> float:
    """Return which part of the rates a block reaches, forward and backward."""
    block = _Block().to(device)
    batch = torch.rand(4, 128, 256, device=device)

    def step(model: Any, x: Any) -> Tensor:
        loss: Tensor = model(x).square().mean()
        return loss

    log = OperatorLog()
    measure_footprint(block, None, batch, step, operators=log)
    expected = sum(machine.seconds_of(Operators.of(pass_)) for pass_ in (log.forward, log.backward))
    measured = _seconds(lambda: step(block, batch).backward(), device)
    found = torch.tensor(expected / measured, device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MIN)
    return float(found)


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
