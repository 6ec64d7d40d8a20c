"""A script's run in a process: a recorder joins it, writes what was trained, and may send it a SIGTERM."""

import functools
import inspect
import json
import math
import multiprocessing
import os
import runpy
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from tp_core.compare import dropout_rates, named_tensors
from tp_core.errors import ConfigError, LoaderError, ModelError, SelectionError, StepError
from tp_core.plugins import Backend, Callback, RunView, registry
from tp_core.random import capture_rng_state
from tp_core.tensors import is_dtensor

_REFUSALS = (ConfigError, LoaderError, ModelError, SelectionError, StepError)
"""The errors of what a backend cannot prepare as it is; any other one, or one after a step, is a failure."""

INPUTS = "inputs.pt"
"""The file with the arguments of the model's first call."""

_STEPS, _BEYOND, _LONGEST = 12, 4, 60
"""The steps of a run by default, or those beyond its first epoch, where that has no more than the last."""
MOST_STEPS = _LONGEST + _BEYOND


def steps_beyond(epoch: int) -> int:
    """Return the optimizer steps of a run by default, for the length of an epoch; 0 for one without."""
    if epoch > _LONGEST:
        return _STEPS
    return max(_STEPS, epoch + _BEYOND)


def run_script(script: str, arguments: list[str], folder: Path, is_launched: bool) -> int:
    """Run a script as Python's own command line does, and return its exit status.

    What it prints goes to ``output{rank}`` in the folder, the reason of a failure to ``error{rank}.json``.
    """
    rank = os.environ["RANK"]
    if not is_launched:
        for name in ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            del os.environ[name]
    multiprocessing.current_process().daemon = False  # those have no loader workers
    descriptor = os.open(folder / f"output{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for standard in (1, 2):  # also of native code: the report alone is for this command's own output
        os.dup2(descriptor, standard)
    global _drops  # noqa: PLW0603 - torch's functions are the process's
    watch_dropout()
    _drops = not json.loads(os.environ["TP_VERIFY"])["plain"]
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).absolute().parent))
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as error:
        if isinstance(error.code, int):
            return error.code
        return int(error.code is not None)
    except Exception as error:
        _write_error(error, folder, rank)
        raise
    return 0


def _write_error(error: Exception, folder: Path, rank: str) -> None:
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    is_refused = isinstance(error, _REFUSALS) and not (folder / f"stepped{rank}").exists()
    reason = f"{type(error).__name__}: {first}"
    if is_refused:
        reason = first
    (folder / f"error{rank}.json").write_text(json.dumps({"failed": reason, "is_refused": is_refused}))


class ScriptRecorder(Callback):
    """Records weights, states, metrics, the order of samples and random numbers of one rank.

    The variable ``TP_VERIFY`` has its settings as JSON: "folder", where records go; "stops", whether the run
    gets a SIGTERM within its "steps", which are 0 where they follow from the length of an epoch; "plain",
    whether dropout and batch statistics are left out; "nudge", by which rounding the first weights differ, or
    0; "inputs", a file with what the model got in its first step, for a backend that splits the model itself.
    """

    def __init__(self) -> None:
        self._settings: dict[str, Any] = json.loads(os.environ["TP_VERIFY"])
        self._folder = Path(self._settings["folder"])
        self._is_drawn = False
        self._epoch_steps = self._stop = 0
        self._rows: list[list[float]] = []
        self._norms: dict[int, dict[str, float]] = {}
        self._metrics: dict[int, dict[str, float]] = {}

    def on_setup(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Have the backend of a trial put the model into the form that it trains."""
        inputs = self._settings["inputs"]
        if not inputs:
            return
        named = {each.item.name: each.item for each in registry.backends()}
        names = {id(p): name for name, p in model.named_parameters()}
        try:
            _adapt(named[os.environ["TP_BACKEND"]], model, Path(inputs))
        except Exception as error:
            # A callback that fails is left out of the run; without its model this trial has no sense.
            _write_error(error, self._folder, os.environ.get("RANK", "0"))
            raise SystemExit(1) from error
        made = dict(model.named_parameters())
        for group in optimizer.param_groups:
            group["params"][:] = [made[names[id(p)]] if id(p) in names else p for p in group["params"]]

    def on_fit_start(self, run: RunView) -> None:
        """Watch the rows that the model gets."""
        torch.set_num_threads(1)  # with more, sums have another order
        for name, module in run.model.named_modules():
            self._is_drawn |= _is_drawn(module)
            if self._settings["plain"]:
                _leave_out(module)
            if not name:
                module.register_forward_pre_hook(self._see, with_kwargs=True)
        if self._settings["nudge"]:
            _nudge(run.model, self._settings["nudge"])

    def _see(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        first = next((t for _, t in named_tensors((args, kwargs)) if t.dim()), None)
        if not module.training or first is None:
            return
        if not self._rows:
            with suppress(Exception):  # arguments that cannot be pickled
                torch.save((args, kwargs), self._folder / INPUTS)
        rows = first.detach().double().reshape(first.size(0), -1)
        weights = torch.arange(1, rows.size(1) + 1, dtype=torch.float64).sqrt()
        self._rows.append((rows.cpu() * weights).sum(1).tolist())

    def on_step_end(self, run: RunView) -> None:
        """Send the signal after its step."""
        if run.step == 1:
            (self._folder / f"stepped{run.rank}").touch()
            self._epoch_steps = _epoch_steps(run)
            if self._settings["stops"]:
                self._stop = max(1, (self._settings["steps"] or steps_beyond(self._epoch_steps)) * 2 // 5)
        whole = {n: p.detach() for n, p in run.model.named_parameters() if not is_dtensor(p) and p.numel()}
        if whole:
            norms = torch.stack([p.double().norm().cpu() for p in whole.values()]).tolist()
        else:
            norms = []
        self._norms[run.step] = dict(zip(whole, norms, strict=True))
        if run.step == self._stop and run.is_main:
            (self._folder / "stopped").write_text(repr(time.time()))
            os.kill(os.getpid(), signal.SIGTERM)

    def on_epoch_end(self, run: RunView) -> None:
        """Keep the metrics of the epoch."""
        self._metrics[run.epoch] = dict(run.metrics)

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
                    states[f"{names[id(parameter)]}:{key}"] = value
        record = {
            "step": run.step,
            "backend": run.backend,
            "epoch_steps": self._epoch_steps,
            "weights": _own(dict(run.model.named_parameters())),
            "buffers": _own(dict(run.model.named_buffers())),
            "states": _own(states),
            "rows": self._rows,
            "norms": self._norms,
            "metrics": {**self._metrics, run.epoch: dict(run.metrics)},
            "is_drawn": self._is_drawn or bool(_drawing),
            "random": capture_rng_state([]),
        }
        torch.save(record, self._folder / f"rank{run.rank}.pt")


def _adapt(backend: Backend[Any], model: nn.Module, inputs: Path) -> None:
    """Have a backend change a model in place, with example inputs where a run could save them."""
    args, kwargs = torch.load(inputs, weights_only=False) if inputs.is_file() else ((), {})
    if kwargs:
        args = dict(zip(inspect.signature(model.forward).parameters, args, strict=False)) | kwargs
    if backend.adapt_model(model, args or None) is not model:
        msg = f"backend {backend.name!r} makes another module of this model, which the script would not train"
        raise ConfigError(msg)


def _epoch_steps(run: RunView) -> int:
    """Return the optimizer steps of an epoch, after the first one; 0 where it has no length."""
    try:
        return math.ceil(len(run.loader) / max(1, run.batches_done))
    except TypeError:  # a stream
        return 0


def _own(tensors: dict[str, Any]) -> dict[str, Tensor]:
    """Return copies of the tensors that this rank has itself; of DTensors the checkpoint has the whole."""
    return {name: t.detach().cpu().clone() for name, t in tensors.items() if not is_dtensor(t)}


def _is_drawn(module: nn.Module) -> bool:
    """Return whether parts of a batch do otherwise than the whole: dropout, and batch statistics."""
    return isinstance(module, nn.modules.batchnorm._BatchNorm) or bool(dropout_rates(module))


_drawing: set[str] = set()
"""The functions that dropped something in this process."""

_drops = True
"""Whether they drop."""


@functools.cache
def watch_dropout() -> None:
    """Have torch's functions note each call that drops something; once in a process and its children."""
    places = dict.fromkeys(("dropout", "dropout1d", "dropout2d", "dropout3d"), ("p", 1))
    places |= dict.fromkeys(("alpha_dropout", "feature_alpha_dropout"), ("p", 1))
    places |= {"scaled_dot_product_attention": ("dropout_p", 4)}
    for name, (key, at) in places.items():
        setattr(nn.functional, name, _watched(getattr(nn.functional, name), key, at))


def _watched(function: Callable[..., Tensor], key: str, at: int) -> Callable[..., Tensor]:
    """Return a dropout function that notes its calls; ``key`` names its rate, the ``at``-th argument."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Tensor:
        # The default rate is above zero, but for attention.
        if len(args) > at:
            rate = args[at]
        else:
            rate = kwargs.get(key, at == 1)
        if rate:
            _drawing.add(function.__name__)
        if rate and not _drops and len(args) > at:
            args = (*args[:at], 0.0, *args[at + 1 :])
        elif rate and not _drops:
            kwargs[key] = 0.0
        return function(*args, **kwargs)

    return call


@torch.no_grad()
def _nudge(model: nn.Module, seed: int) -> None:
    """Push each weight up or down by one rounding."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.is_floating_point():
            signs = torch.randn(parameter.shape, generator=generator).sign().to(parameter)
            parameter.copy_(parameter.nextafter(signs * torch.finfo(parameter.dtype).max))


def _leave_out(module: nn.Module) -> None:
    for key in dropout_rates(module):
        setattr(module, key, 0.0)
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        module.eval()
        module.train = lambda mode=True: module  # type: ignore[method-assign]  # noqa: ARG005 - it stays so
