"""The largest norm of the gradients in each epoch."""

from collections.abc import Mapping
from typing import Any

import torch
from tp_core.plugins import Callback, RunView

__all__ = ["MyPluginCallback"]


class MyPluginCallback(Callback):
    """Keeps the largest norm of the gradients in an epoch, and hands it to the loggers.

    Attributes:
        largest: The largest norm of each epoch that has ended.
    """

    def __init__(self) -> None:
        self.largest: list[float] = []
        self._highest: torch.Tensor | None = None

    def on_optimizer_step(self, run: RunView, grad_norm: torch.Tensor) -> None:
        """Keep it where it is larger; it stays on its device, so that nothing waits for it."""
        norm = grad_norm.detach()
        self._highest = norm if self._highest is None else torch.maximum(self._highest, norm)

    def on_epoch_end(self, run: RunView) -> None:
        """Log the epoch's."""
        if self._highest is not None:
            self.largest.append(float(self._highest))
            run.log(largest_grad_norm=self.largest[-1])
        self._highest = None

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run goes on with."""
        return {"largest": list(self.largest), "highest": self._highest}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with it."""
        self.largest, self._highest = list(state["largest"]), state["highest"]
