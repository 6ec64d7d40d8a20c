"""The recorder of a script's run: it joins the run, writes what was trained, and may send it a SIGTERM."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tp_core.internal import is_dtensor
from tp_core.plugins import Callback, RunView


class Recorder(Callback):
    """Records weights, states, metrics, the order of samples and random numbers of one rank.

    The variable ``TP_VERIFY`` has its settings as JSON: "folder", where records go; "stop", the step after
    which the run gets a SIGTERM; "plain", whether dropout and batch statistics are left out.
    """

    def __init__(self) -> None:
        self._settings: dict[str, Any] = json.loads(os.environ["TP_VERIFY"])
        self._rows: list[list[float]] = []
        self._metrics: list[dict[str, float]] = []

    def on_fit_start(self, run: RunView) -> None:
        """Watch the rows that the model gets."""
        torch.set_num_threads(1)  # with more, sums have another order
        for name, module in run.model.named_modules():
            if self._settings["plain"]:
                _leave_out(module)
            if not name:
                module.register_forward_pre_hook(self._see)

    def _see(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if module.training and args and isinstance(args[0], Tensor):
            rows = args[0].detach().double().flatten(1) if args[0].dim() > 1 else args[0].double()[:, None]
            weights = torch.arange(1, rows.size(1) + 1, dtype=torch.float64).sqrt()
            self._rows.append((rows.cpu() @ weights).tolist())

    def on_step_end(self, run: RunView) -> None:
        """Send the signal after its step."""
        if run.step == self._settings.get("stop") and run.is_main:
            (Path(self._settings["folder"]) / "stopped").write_text(repr(time.time()))
            os.kill(os.getpid(), signal.SIGTERM)

    def on_epoch_end(self, run: RunView) -> None:
        """Keep the metrics of the epoch."""
        self._metrics.append(dict(run.metrics))

    def on_interruption(self, run: RunView, signal_number: int) -> None:  # noqa: ARG002 - contract
        """Write what there is."""
        self._write(run)

    def on_fit_end(self, run: RunView) -> None:
        """Write the record."""
        self._write(run)

    def _write(self, run: RunView) -> None:
        names = {id(p): n for n, p in run.model.named_parameters()}
        states = {}
        for parameter, state in run.optimizer.state.items():
            for key, value in state.items():
                if isinstance(value, Tensor) and id(parameter) in names:
                    states[f"{names[id(parameter)]}:{key}"] = _whole(value)
        record = {
            "step": run.step,
            "weights": {n: _whole(p) for n, p in run.model.named_parameters()},
            "buffers": {n: _whole(b) for n, b in run.model.named_buffers()},
            "states": states,
            "rows": self._rows,
            "metrics": [*self._metrics, dict(run.metrics)],
            "random": torch.get_rng_state(),
        }
        torch.save(record, Path(self._settings["folder"]) / f"rank{run.rank}.pt")


def _whole(tensor: Tensor) -> Tensor:
    """Return a whole tensor; of a DTensor an all-gather, on all ranks alike."""
    found = tensor.full_tensor() if is_dtensor(tensor) else tensor
    return found.detach().cpu().clone()


def _leave_out(module: nn.Module) -> None:
    """Leave out what parts of a batch may do otherwise than the whole: dropout and batch statistics."""
    for key, value in list(vars(module).items()):
        if type(value) is float and ("drop" in key or (key == "p" and "Dropout" in type(module).__name__)):
            setattr(module, key, 0.0)
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        module.eval()
        module.train = lambda mode=True: module  # type: ignore[method-assign]  # noqa: ARG005 - it stays so
