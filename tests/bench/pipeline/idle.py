"""The time that ranks wait in a step in stages: python -m tests.bench.pipeline.idle

Beside the published formulas, and what "auto" predicts. Each stage sleeps for a fixed time, so that cores
which ranks share do not matter: as long again for the gradients of its inputs and for those of its weights.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tp_core import LaunchEnvironment, resolve_devices
from tp_core.plugins import Job, registry
from tp_pipeline import PipelineOptions
from tp_pipeline._schedule import Orders, idle_share, timeline  # private: no public name simulates
from tp_testing import run_ranks

from tests.bench._results import Results

SCHEDULES = (
    "GPipe",
    "1F1B",
    "LoopedBFS",
    "Interleaved1F1B",
    "InterleavedZeroBubble",
    "ZBVZeroBubble",
    "DualPipeV",
)


class _Sleep(torch.autograd.Function):
    """A tensor as it is: forward sleeps for one time, backward for another one. Nothing is exchanged."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        time.sleep(ctx.backward_s)
        return grad, None, None


class SleepingBlock(nn.Module):
    """A block of a fixed time: once forward, once for its input's gradient, and once for its weight's."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.shift, self.weight = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.eye(2))
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        # The shift lets the first stage go back to its input, too, as an embedding does.
        x = _Sleep.apply(x + self.shift, self.seconds, self.seconds)  # type: ignore[no-untyped-call]
        return x @ _Sleep.apply(self.weight, 0.0, self.seconds)  # type: ignore[no-untyped-call]


def sleep_in_stages(schedule: str, ranks: int, parts: int, stage_s: float, path: str) -> None:
    """Take three steps, the last of which is traced; call it on each rank.

    Args:
        schedule: The name of the schedule.
        ranks: The number of ranks.
        parts: The number of micro-batches.
        stage_s: The seconds that the stages of a rank sleep for a micro-batch in forward.
        path: The file of the trace.
    """
    options = PipelineOptions(schedule=schedule, microbatches=parts, trace=path)  # type: ignore[arg-type]
    orders = Orders(schedule, ranks)
    model = nn.Sequential(*(SleepingBlock(stage_s / orders.depth) for _ in range(orders.stages)))
    job = Job(
        devices=resolve_devices("cpu"),
        environment=LaunchEnvironment.read(),
        options={"pipeline": options},
        model=model,
    )
    (backend,) = (c.item for c in registry.backends() if c.item.name == "pipeline")
    with backend.open(job) as session:
        prepared = session.prepare_model(model)
        batch = torch.ones(parts, 2)
        for _ in range(3):
            loss: Any = session.run(lambda m, b: m(b).mean(), prepared, batch)
            session.backward(loss)


def measured_share(path: Path) -> tuple[float, float]:
    """Return the share of a trace in which ranks computed nothing, and the ms for each computation."""
    events = [e for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "X"]
    whole = max(e["ts"] + e["dur"] for e in events) - min(e["ts"] for e in events)
    ranks = len({e["tid"] for e in events})
    return float(1 - sum(e["dur"] for e in events) / whole / ranks), whole / 1000 / len(events) * ranks


def predicted_share(schedule: str, ranks: int, parts: int) -> float:
    """Return the share that "auto" predicts."""
    orders = Orders(schedule, ranks)
    return idle_share(timeline(orders.learning(parts), orders.stages - 1))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--schedules", nargs="+", default=list(SCHEDULES))
    parser.add_argument("--seconds", type=float, default=0.1)
    arguments = parser.parse_args()
    with Results("pipeline-idle", is_part=arguments != parser.parse_args([])) as results:
        results.add("sleep of the stages of a rank", arguments.seconds, "s")
        for ranks in arguments.ranks:
            for name in arguments.schedules:
                with tempfile.TemporaryDirectory() as folder:
                    path = Path(folder, "stages.json")
                    run_ranks(sleep_in_stages, ranks, name, ranks, 8, arguments.seconds, str(path))
                    measured, each_ms = measured_share(path)
                predicted = predicted_share(name, ranks, 8)
                case = f"{ranks} ranks, {name}"
                results.add(f"{case}: predicted", 100 * predicted, "%")
                results.add(f"{case}: measured", 100 * measured, "%")
                results.add(f"{case}: ratio", measured / predicted if predicted else 1.0, "")
                results.add(f"{case}: beyond, for each computation", (measured - predicted) * each_ms, "ms")


if __name__ == "__main__":
    from tests.bench.pipeline import idle as program  # so that ranks import it by its name

    program.main()
