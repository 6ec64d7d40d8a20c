"""Time of a step in stages: python -m tests.bench.pipeline.steps

Beside the same schedule by hand on torch.distributed.pipelining, on gloo. Both take turns in the same
processes, on copies of one model; a ratio is the median over the rounds. The idle share of a schedule is read
from its trace, and compared with the prediction of "auto": it needs a core for each rank.
"""

import argparse
import copy
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class
from tp_core import LaunchEnvironment, resolve_devices
from tp_core.plugins import Job
from tp_core.testing import run_ranks
from tp_pipeline import PipelineOptions
from tp_pipeline._backend import PipelineBackend  # private: a step without a trainer
from tp_pipeline._schedule import Orders, idle_share, rank_of_stage, timeline

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
    me, device, count = dist.get_rank(), torch.device("cpu"), ranks * options.depth
    own = [s for s in range(count) if rank_of_stage(s, ranks, is_v=options.is_v) == me]
    each = BLOCKS // count
    stages = [PipelineStage(model[s * each : (s + 1) * each], s, count, device) for s in own]
    kind: Any = get_schedule_class(options.schedule)
    schedule = kind(stages if issubclass(kind, PipelineScheduleMulti) else stages[0], parts, F.mse_loss)

    def step(x: Tensor, y: Tensor) -> None:
        losses: list[Tensor] = []
        last = {"target": y, "losses": losses} if count - 1 in own else {}
        schedule.step(*([x] if 0 in own else []), **last)

    return step


def times(
    name: str, ranks: int, parts: int, rounds: int, folder: str
) -> tuple[list[float], list[float], float]:
    """Return the seconds of each step by hand and of ours, and the predicted idle share."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(BLOCKS)))
    x, y = torch.randn(2, ROWS, TOKENS, WIDTH)
    options = PipelineOptions(schedule=name, microbatches=parts, trace=f"{folder}/trace.json")  # type: ignore[arg-type]
    job = Job(
        devices=resolve_devices("cpu"),
        environment=LaunchEnvironment.read(),
        options={"pipeline": options},
        model=model,
    )
    with PipelineBackend().open(job) as session:
        hand = by_hand(copy.deepcopy(model), options, ranks, parts)
        prepared = session.prepare_model(model)

        def ours(x: Tensor, y: Tensor) -> None:
            session.backward(session.run(lambda m, b: F.mse_loss(m(b[0]), b[1]), prepared, (x, y)))  # type: ignore[arg-type]

        found: tuple[list[float], list[float]] = [], []
        for number in range(rounds + 3):
            for seconds, step in zip(found, (hand, ours), strict=True):
                dist.barrier()
                begin = time.perf_counter()
                step(x, y)
                dist.barrier()
                if number >= 3:  # the first ones warm up
                    seconds.append(time.perf_counter() - begin)
        orders = Orders(name, ranks, options.depth, is_v=options.is_v)
        return *found, idle_share(timeline(orders.learning(parts), orders.stages - 1))


def traced_idle_share(path: Path) -> float:
    events = [e for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "X"]
    whole = max(e["ts"] + e["dur"] for e in events) - min(e["ts"] for e in events)
    return 1 - sum(e["dur"] for e in events) / whole / len({e["tid"] for e in events})


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
                with tempfile.TemporaryDirectory() as folder:
                    given = (name, ranks, 8, arguments.rounds, folder)
                    hand, ours, predicted = run_ranks(times, ranks, *given)[0]
                    measured = traced_idle_share(Path(folder, "trace.json"))
                case = f"{ranks} stages' ranks, {name}"
                results.add(f"{case}, by hand", 1e3 * statistics.median(hand), "ms")
                ratio = statistics.median(a / b for a, b in zip(ours, hand, strict=True))
                results.add(f"{case}: ratio", ratio, "of by hand", note="at most 1.03")
                results.add(f"{case}: idle share, predicted", 100 * predicted, "%")
                results.add(f"{case}: idle share, measured", 100 * measured, "%")


if __name__ == "__main__":
    from tests.bench.pipeline import steps as program  # so that ranks import it by its name

    program.main()
