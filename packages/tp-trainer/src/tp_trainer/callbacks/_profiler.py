"""Traces of a few steps, by torch's profiler."""

import os
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule, supported_activities
from tp_core.arguments import explain_init
from tp_core.files import write_atomically
from tp_core.plugins import Callback, RunView

from tp_trainer._checks import check_positive


@explain_init
class Profiler(Callback):
    """Writes a trace of some optimizer steps for each rank, for Perfetto or ``chrome://tracing``.

    The step before them, if there is one, warms up the profiler and is not recorded. A run that starts after
    them writes no trace; a run that ends within them writes a shorter one.

    Args:
        folder: The folder for the traces, ``steps-10-12-rank-0.json`` and so on.
        first_step: The first optimizer step of the trace, from 1.
        steps: The number of steps.
        with_stack: Whether to record Python source lines.
        record_shapes: Whether to record the shapes of operators' inputs.
        profile_memory: Whether to record allocations.

    Raises:
        ConfigError: A number is out of its range.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        first_step: int = 10,
        steps: int = 3,
        with_stack: bool = False,
        record_shapes: bool = False,
        profile_memory: bool = False,
    ) -> None:
        check_positive("first_step", first_step)
        check_positive("steps", steps)
        self._folder = Path(folder)
        self._first, self._last = first_step, first_step + steps - 1
        self._with_stack, self._record_shapes = with_stack, record_shapes
        self._profile_memory = profile_memory
        self._profile: profile | None = None

    def on_fit_start(self, run: RunView) -> None:
        """Start at once, if the trace has the run's first steps."""
        self._begin(run)

    def on_step_end(self, run: RunView) -> None:
        if self._profile is None:
            self._begin(run)
            return
        self._profile.step()
        if run.step >= self._last:
            self._end()

    def on_fit_end(self, run: RunView) -> None:  # noqa: ARG002 - contract
        self._end()

    def on_exception(self, run: RunView, error: BaseException) -> None:  # noqa: ARG002 - contract
        self._end()

    def on_interruption(self, run: RunView, signal_number: int) -> None:  # noqa: ARG002 - contract
        self._end()

    def _begin(self, run: RunView) -> None:
        if not self._first - 2 <= run.step < self._last:
            return
        warm_up = 1 if run.step == self._first - 2 else 0
        first, rank = run.step + 1 + warm_up, run.rank

        def write(finished: profile) -> None:
            self._folder.mkdir(parents=True, exist_ok=True)
            path = self._folder / f"steps-{first}-{self._last}-rank-{rank}.json"
            write_atomically(lambda part: finished.export_chrome_trace(str(part)), path)

        activities = [ProfilerActivity.CPU]
        if torch.accelerator.is_available():  # else torch warns of activities that it was built for
            activities += sorted(supported_activities() - {ProfilerActivity.CPU}, key=str)
        # Without a warm-up step there is no schedule: the profiler records until it is stopped.
        steps = None
        if warm_up:
            steps = schedule(wait=0, warmup=1, active=self._last - first + 1, repeat=1)
        self._profile = profile(
            activities=activities,
            schedule=steps,
            on_trace_ready=write,
            with_stack=self._with_stack,
            record_shapes=self._record_shapes,
            profile_memory=self._profile_memory,
            acc_events=True,  # there is one cycle; torch 2.11 warns of what would be lost between several
        )
        self._profile.start()

    def _end(self) -> None:
        if self._profile is not None:
            self._profile.stop()
            self._profile = None
