"""Time of a step in stages: python -m tests.bench.pipeline.steps

Beside the same schedule by hand on torch.distributed.pipelining, on gloo, and beside the backends ddp and
fsdp, whose ranks have whole layers and a part of the batch each. All take turns in the same processes, on
copies of one model; a ratio is the median over the rounds.
"""

import argparse
import copy
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class
from tp_core import LaunchEnvironment, resolve_devices
from tp_core.plugins import Job, registry
from tp_pipeline import PipelineOptions
from tp_pipeline._schedule import Orders  # private: which stages a rank has
from tp_testing import run_ranks

from tests.bench._results import Results

WIDTH, TOKENS, ROWS, BLOCKS = 256, 64, 16, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 1024), nn.Linear(1024, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def by_hand(model: nn.Sequential, options: PipelineOptions, ranks: int, parts: int) -> Any:
    """Return a function that runs a step on torch's own schedule, with its mean of means."""
    device, orders = torch.device("cpu"), Orders(options.schedule, ranks)
    own, count = orders.stages_of(dist.get_rank()), orders.stages
    each = BLOCKS // count
    stages = [PipelineStage(model[s * each : (s + 1) * each], s, count, device) for s in own]
    kind: Any = get_schedule_class(options.schedule)
    schedule = kind(stages if issubclass(kind, PipelineScheduleMulti) else stages[0], parts, F.mse_loss)

    def step(x: Tensor, y: Tensor) -> None:
        losses: list[Tensor] = []
        last = {"target": y, "losses": losses} if count - 1 in own else {}
        schedule.step(*([x] if 0 in own else []), **last)

    return step


def by_backend(
    stack: ExitStack, backend: str, model: nn.Module, options: PipelineOptions
) -> Callable[[Tensor, Tensor], None]:
    """Return a function that runs a step on a backend, with a rank's part of the batch."""
    job = Job(
        devices=resolve_devices("cpu"),
        environment=LaunchEnvironment.read(),
        options={"pipeline": options},
        model=model,
    )
    (chosen,) = [c.item for c in registry.backends() if c.item.name == backend]
    session = stack.enter_context(chosen.open(job))
    prepared = session.prepare_model(model)

    def step(x: Tensor, y: Tensor) -> None:
        rows = slice(session.data_rank, None, session.data_size)
        loss: Any = session.run(lambda m, b: F.mse_loss(m(b[0]), b[1]), prepared, (x[rows], y[rows]))
        session.backward(loss)

    return step


def times(name: str, ranks: int, parts: int, rounds: int, others: Sequence[str]) -> dict[str, list[float]]:
    """Return the seconds of each step by hand, of ours, and of other backends."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(BLOCKS)))
    x, y = torch.randn(2, ROWS, TOKENS, WIDTH)
    options = PipelineOptions(schedule=name, microbatches=parts)  # type: ignore[arg-type]  # of names
    with ExitStack() as stack:
        backends = ("pipeline", *others)
        models = {one: copy.deepcopy(model) for one in (*backends, "by hand")}
        steps = {one: by_backend(stack, one, models[one], options) for one in backends}
        steps["by hand"] = by_hand(models["by hand"], options, ranks, parts)
        found: dict[str, list[float]] = {one: [] for one in steps}
        for number in range(rounds + 3):
            for one, step in steps.items():
                dist.barrier()
                begin = time.perf_counter()
                step(x, y)
                dist.barrier()
                if number >= 3:  # the first ones warm up
                    found[one].append(time.perf_counter() - begin)
                models[one].zero_grad()  # as an optimizer's step is followed by
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument(
        "--schedules", nargs="+", default=["GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble"]
    )
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    with Results("pipeline-steps", is_part=arguments != parser.parse_args([])) as results:
        for ranks in arguments.ranks:
            for name in arguments.schedules:
                others = ("ddp", "fsdp") if name == "1F1B" else ()
                found = run_ranks(times, ranks, name, ranks, 8, arguments.rounds, others)[0]
                hand, case = found.pop("by hand"), f"{ranks} ranks, {name}"
                results.add(f"{case}, by hand", 1e3 * statistics.median(hand), "ms")
                for one, seconds in found.items():
                    ratio = statistics.median(a / b for a, b in zip(seconds, hand, strict=True))
                    note = "at most 1.03" if one == "pipeline" else ""
                    results.add(f"{case}, {one}: ratio", ratio, "of by hand", note=note)


if __name__ == "__main__":
    from tests.bench.pipeline import steps as program  # so that ranks import it by its name

    program.main()
