"""Numbers of a run beside its metrics, handed to the loggers."""

from torch import Tensor
from tp_core.plugins import Callback, RunView

__all__ = ["GradientNorm", "LearningRateMonitor"]


class LearningRateMonitor(Callback):
    """Logs the learning rate of each group of parameters after each optimizer step.

    "lr" where there is one group; else "lr/0", "lr/1" and so on, or "lr/name" of groups that have a "name".
    With several optimizers their names come first: "lr/generator/0".
    """

    def on_step_end(self, run: RunView) -> None:
        """Log the rates that the next step will have."""
        rates = {}
        for name, optimizer in run.optimizers.items():
            prefix = "lr" if len(run.optimizers) == 1 else f"lr/{name}"
            groups = optimizer.param_groups
            for i, group in enumerate(groups):
                rates[prefix if len(groups) == 1 else f"{prefix}/{group.get('name', i)}"] = group["lr"]
        run.log(**rates)


class GradientNorm(Callback):
    """Logs "grad_norm" in each optimizer step: the global norm of the gradients before they are clipped."""

    def on_optimizer_step(self, run: RunView, grad_norm: Tensor) -> None:
        """Log the norm; it stays on its device until numbers are read."""
        run.log(grad_norm=grad_norm)
