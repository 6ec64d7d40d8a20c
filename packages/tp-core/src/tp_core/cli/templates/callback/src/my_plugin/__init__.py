"""A callback for tp: the largest norm of the gradients in each epoch.

tp loads this module with all other plugins at its first question, so it imports what is heavy
in functions only.
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from tp_core.plugins import Callback, NamedCallback, RunView, hookimpl

if TYPE_CHECKING:
    import torch

tp_contract = 1


class MyPluginCallback(Callback):
    """Keeps the largest norm of the gradients in an epoch, and hands it to the loggers.

    Attributes:
        largest: The largest norm of each epoch that has ended.
    """

    def __init__(self) -> None:
        self.largest: list[float] = []
        self._highest: Any = None

    def on_optimizer_step(self, run: RunView, grad_norm: "torch.Tensor") -> None:
        """Keep it where it is larger; it stays on its device, so that nothing waits for it."""
        norm = grad_norm.detach()
        self._highest = norm if self._highest is None else norm.maximum(self._highest)

    def on_epoch_end(self, run: RunView) -> None:
        """Log the epoch's."""
        if self._highest is not None:
            self.largest.append(float(self._highest))
            run.log(largest_grad_norm=self.largest[-1])
        self._highest = None

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run continues with."""
        return {"largest": list(self.largest), "highest": self._highest}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with it."""
        self.largest, self._highest = list(state["largest"]), state["highest"]


@hookimpl
def tp_callbacks() -> Iterable[NamedCallback]:
    """Bring the callback, by name."""
    return [
        NamedCallback("my-plugin", "Keeps the largest norm of the gradients.", MyPluginCallback)
    ]
