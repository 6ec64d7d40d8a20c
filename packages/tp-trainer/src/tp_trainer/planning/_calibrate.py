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
from time import perf_counter, process_time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from tp_core import LaunchEnvironment, resolve_devices
from tp_core.errors import ConfigError
from tp_core.internal import all_gather_single, device_of_rank, reduce_scatter_single
from tp_core.sessions import join_process_group

from tp_trainer._launch._function import launch
from tp_trainer._memory import OperatorLog, measure_footprint
from tp_trainer.planning._machine import Machine, Operators

_ROUNDS = 5
_LEAST_S = 0.04
"""The seconds of a round: long enough for ranks that share a core to take turns."""
_WIDTH = 512
_ROWS = (96, 256, 768)  # of square matrices
_FLOATS = (2**13, 2**16, 2**18, 2**19, 2**20, 2**22)  # which caches hold, and which they do not
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
        start_s = _start_s(device)
        products = [[0.0, start_s]]
        for n in _ROWS:
            matrix = torch.rand(n, n, device=device)
            products.append([2.0 * n**3, _seconds(lambda: matrix @ matrix, device)])  # noqa: B023
        memory = [[0.0, start_s]]
        for n in _FLOATS:
            values = torch.rand(n, device=device)
            memory.append([2.0 * values.nbytes, _seconds(lambda: values + 1.0, device)])  # noqa: B023
        alone = _seconds(lambda: matrix @ matrix, device, alone=True)
        found = Machine(
            flops=products[-1][0] / products[-1][1],
            bandwidth=memory[-1][0] / memory[-1][1],
            start_s=start_s,
            operators={"products": _rising(products), "memory": _rising(memory)},
            is_ahead=device.type != "cpu",
            overlap=_overlap(matrix, device),
            crowding=max(1.0, products[-1][1] / alone, _ranks_for_a_core(device, ranks)),
            collectives={
                kind: {str(n): _line(run, device, n) for n in sorted({2, ranks})}
                for kind, run in _collectives()
            },
            source=f"measured on {ranks} ranks, {device.type}",
        )
        return asdict(replace(found, slower=_of_blocks(found, device), dtensor_s=_of_dtensors(device)))
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


def _rising(points: list[list[float]]) -> list[list[float]]:
    """Return measured sizes without those that took no longer than a smaller one."""
    found = points[:1]
    for point in points[1:]:
        if point[1] > found[-1][1]:
            found.append(point)
    return found


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


def _start_s(device: torch.device) -> float:
    """Return the seconds to start an operator of a model in training, with what Python and autograd take."""
    model, batch = _Block(16).to(device), torch.rand(2, 8, 16, device=device)
    log = OperatorLog()
    measure_footprint(model, None, batch, _square, operators=log)
    return _seconds(lambda: _square(model, batch).backward(), device) / (len(log.forward) + len(log.backward))


def _square(model: Any, x: Any) -> Tensor:
    loss: Tensor = model(x).square().mean()
    return loss


def _of_blocks(machine: Machine, device: torch.device) -> dict[str, float]:
    """Return how many times as long as by single operators each pass of two blocks takes."""
    model = nn.Sequential(_Block(), _Block()).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.rand(2, 128, _WIDTH, device=device)

    log = OperatorLog()
    measure_footprint(model, optimizer, batch, _square, operators=log)
    forward = _seconds(lambda: _square(model, batch), device)

    def train() -> None:
        optimizer.zero_grad()
        _square(model, batch).backward()

    both = _seconds(train, device)
    measured = {
        "forward": forward,
        "backward": both - forward,
        "update": _seconds(lambda: optimizer.step(), device),  # noqa: PLW0108 - it returns a value
    }
    return {name: measured[name] / machine.seconds_of(Operators.of(getattr(log, name))) for name in measured}


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


def _line(run: _Run, device: torch.device, ranks: int) -> list[float]:
    """Return latency, seconds for each byte and part of the cores of a collective among ``ranks`` neighbors.

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
        began, computed = perf_counter(), process_time()
        seconds = _seconds(lambda: run(whole, mine) if mine is not None else None, device)  # noqa: B023
        busy = (process_time() - computed) / (perf_counter() - began)  # of the largest size in the end
        points.append((whole.nbytes, seconds))
    (low, first_s), *_, (high, last_s) = points
    per_byte = max(0.0, (last_s - first_s) / (high - low))
    busy *= world / (os.cpu_count() or 1) if device.type == "cpu" else 0.0
    return [max(0.0, first_s - low * per_byte), per_byte, min(1.0, busy)]
