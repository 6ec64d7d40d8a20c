"""Callbacks that log learning rates, gradient norms and throughput."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from tp_core.arguments import explain_init
from tp_core.data import PreparedLoader
from tp_core.errors import ConfigError
from tp_core.plugins import Callback, RunView

from tp_trainer._checks import check_limit, check_positive

_explain_monitor = partial(
    explain_init,
    instead={"logging_interval": "LearningRateMonitor(), and LogOptions(..., every_steps=10) for fewer rows"},
)


@_explain_monitor
class LearningRateMonitor(Callback):
    """Logs the learning rate of each group of parameters after each optimizer step.

    "lr" where there is one group; else "lr/0", "lr/1" and so on, or "lr/name" of groups that have a "name".
    With several optimizers their names come first: "lr/generator/0". Groups without a rate are left out.
    """

    def __init__(self) -> None:
        super().__init__()

    def on_step_end(self, run: RunView) -> None:
        """Log the rates of the next step."""
        rates, optimizers = {}, run.optimizers
        for name, optimizer in optimizers.items():
            prefix = "lr" if len(optimizers) == 1 else f"lr/{name}"
            groups = optimizer.param_groups
            for i, group in enumerate(groups):
                rate = group.get("lr")  # a tensor stays on its device
                if rate is not None:
                    if len(groups) == 1:
                        metric = prefix
                    else:
                        metric = f"{prefix}/{group.get('name', i)}"
                    rates[metric] = rate
        run.log(**rates)


@explain_init
class GradientNorm(Callback):
    """Logs "grad_norm" in each optimizer step: the global norm of the gradients before they are clipped."""

    def __init__(self) -> None:
        super().__init__()

    def on_optimizer_step(self, run: RunView, grad_norm: Tensor) -> None:
        """Log the norm; it stays on its device until numbers are read."""
        run.log(grad_norm=grad_norm)


@explain_init
class Throughput(Callback):
    """Logs the speed of the run, every few optimizer steps and at the end of each epoch.

    Validations do not count. "steps_per_s" and "samples_per_s" are of all ranks together. "waiting" is the
    fraction of the time, from 0 to 1, in which this rank waited for batches. "peak_memory" is the most bytes
    of torch's tensors on this rank's accelerator since the last row; on the CPU, of the process since its
    start. "tokens_per_s" and "mfu" need the arguments below: model FLOPs utilization is the fraction of the
    devices' peak that the model's own operations use.

    Args:
        every_steps: The number of optimizer steps per row.
        tokens_per_sample: The number of tokens in a sample; ``None`` for no "tokens_per_s".
        flops_per_sample: Floating-point operations of a training step for one sample; for a transformer
            about ``6 * parameters * tokens``. ``None`` for no "mfu".
        peak_flops: The floating-point operations per second of all devices, from their data sheet.

    Raises:
        ConfigError: A number is out of its range; or only one of the last two is given.

    Source: Chowdhery et al., "PaLM: Scaling Language Modeling with Pathways", 2022, appendix B, for "mfu".
    """

    def __init__(
        self,
        *,
        every_steps: int = 50,
        tokens_per_sample: float | None = None,
        flops_per_sample: float | None = None,
        peak_flops: float | None = None,
    ) -> None:
        check_positive("every_steps", every_steps)
        for name, value in (
            ("tokens_per_sample", tokens_per_sample),
            ("flops_per_sample", flops_per_sample),
            ("peak_flops", peak_flops),
        ):
            check_limit(name, value)
        if (flops_per_sample is None) is not (peak_flops is None):
            msg = "Throughput takes flops_per_sample and peak_flops together: one is compared with the other"
            raise ConfigError(msg)
        self._every_steps = every_steps
        self._tokens = tokens_per_sample
        if peak_flops is None:
            self._utilization = None
        else:
            self._utilization = (flops_per_sample or 0.0) / peak_flops
        self._began = self._paused = 0.0
        self._steps = self._samples = 0
        self._waited = 0.0
        self._leave: Callable[[], None] = _nothing

    def on_fit_start(self, run: RunView) -> None:
        """Start to measure, and wrap the loader's iteration to time it."""
        loader, before = run.loader, run.loader.watch

        def watch(batches: Iterator[Any]) -> Iterator[Any]:
            if before is not None:
                batches = before(batches)
            return self._watched(loader, batches)

        def leave() -> None:
            loader.watch = before

        loader.watch, self._leave = watch, leave
        self._begin(run)

    def on_fit_end(self, run: RunView) -> None:  # noqa: ARG002 - contract
        self._leave()

    def on_exception(self, run: RunView, error: BaseException) -> None:  # noqa: ARG002 - contract
        self._leave()

    def on_interruption(self, run: RunView, signal_number: int) -> None:  # noqa: ARG002 - contract
        self._leave()

    def _watched(self, loader: PreparedLoader, batches: Iterator[Any]) -> Iterator[Any]:
        while True:
            began = time.perf_counter()
            try:
                batch = next(batches)
            except StopIteration:
                return
            self._waited += time.perf_counter() - began
            if loader.share is not None:
                self._samples += loader.share.total
            yield batch

    def on_epoch_start(self, run: RunView) -> None:
        """Restart the measurement: the time between epochs is not training."""
        self._begin(run)

    def on_epoch_end(self, run: RunView) -> None:
        """Log the remaining steps of the epoch."""
        if run.step > self._steps:
            self._look(run)

    def on_validation_start(self, run: RunView) -> None:  # noqa: ARG002 - contract
        self._paused = time.perf_counter()

    def on_validation_end(self, run: RunView, metrics: object) -> None:  # noqa: ARG002 - contract
        self._began += time.perf_counter() - self._paused

    def on_step_end(self, run: RunView) -> None:
        if run.step - self._steps >= self._every_steps:
            self._look(run)

    def _look(self, run: RunView) -> None:
        is_accelerator = run.device.type != "cpu"
        if is_accelerator:
            torch.accelerator.synchronize(run.device)  # queued work is not done yet
        seconds = max(time.perf_counter() - self._began, 1e-9)
        rate = self._samples / seconds
        numbers = {
            "steps_per_s": (run.step - self._steps) / seconds,
            "samples_per_s": rate,
            "waiting": min(self._waited / seconds, 1.0),
        }
        if self._tokens is not None:
            numbers["tokens_per_s"] = rate * self._tokens
        if self._utilization is not None:
            numbers["mfu"] = rate * self._utilization
        if is_accelerator:
            with contextlib.suppress(RuntimeError):  # the allocator of mps has no statistics
                numbers["peak_memory"] = float(torch.accelerator.max_memory_allocated(run.device))
                torch.accelerator.reset_peak_memory_stats(run.device)
        else:
            with contextlib.suppress(ImportError):  # not on Windows
                import resource

                unit = 1 if sys.platform == "darwin" else 1024
                numbers["peak_memory"] = float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)
        run.log(**numbers)
        self._begin(run)

    def _begin(self, run: RunView) -> None:
        self._began = time.perf_counter()
        self._steps, self._samples, self._waited = run.step, 0, 0.0


def _nothing() -> None:
    pass
