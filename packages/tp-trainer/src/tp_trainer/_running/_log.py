"""The log of a run, between it and its loggers: it keeps tensors on their devices and reads many at once."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from numbers import Real
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from tp_core.errors import ConfigError
from tp_core.output import get_logger
from tp_core.plugins import Logger, RunInfo, RunStatus, Session

from tp_trainer._preparation import Preparation
from tp_trainer._running._settings import Limits, LoopSettings
from tp_trainer._secrets import mask_secrets
from tp_trainer.loggers._jsonl import JsonLinesLogger
from tp_trainer.loggers._named import (
    ConfigLogger,
    candidates,
    config_in_use,
    environment,
    make_loggers,
    versions,
)

log = get_logger("tp_trainer")

Number = float | Tensor


class RunLog:
    """Buffers the numbers of a run, and sends them to the loggers every few steps and at the end.

    Rank 0 opens, feeds and closes the loggers; all ranks make the same calls. Adding a number does not wait
    for an accelerator. The value is copied on its device, and :meth:`flush` reads all values in one transfer.
    Numbers of one step form one row.

    A logger that raises during the run is logged and left out, and the run continues: training is worth more
    than its rows. A logger that raises in its ``open()`` ends the run.

    Args:
        facts: Returns facts about the run, by fields of `RunInfo`; called on rank 0 alone.

    Attributes:
        is_asked: Whether the run logs anything, on all ranks.
    """

    def __init__(
        self,
        session: Session,
        loggers: Iterable[Logger] = (),
        *,
        every_steps: int = 50,
        folder: Path | None = None,
        facts: Callable[[], dict[str, Any]] = dict,
    ) -> None:
        asked = list(loggers)
        self.is_asked = bool(asked)
        self.every = every_steps
        self._session, self._folder, self._facts = session, folder, facts
        self._loggers = asked if session.is_main else []
        self._failed: set[int] = set()
        self._rows: list[tuple[int, int, dict[str, Number]]] = []
        self._last_states: dict[int, dict[str, Any]] = {}
        self._is_open = False

    @property
    def is_on(self) -> bool:
        return bool(self._loggers)

    def open(self, *, resumed: bool, step: int, epoch: int) -> None:
        """Open the loggers; if one cannot be opened, close the earlier ones.

        Raises:
            TpError: A logger cannot be opened; on all ranks.

        Collectives: one broadcast, if the run logs anything.
        """
        if not self.is_asked:
            return
        failure: Exception | None = None
        opened: list[Logger] = []
        try:
            if self.is_on:
                where: dict[str, Any] = {"resumed": resumed, "step": step, "epoch": epoch}
                info = RunInfo(folder=self._folder, **where, **self._facts())
                for logger in self._loggers:
                    logger.open(info)
                    opened.append(logger)
                self._is_open = True
        except Exception as error:  # noqa: BLE001 - all ranks raise it together
            failure = error
        finally:
            if not self._is_open:
                for logger in opened:
                    logger.close("failed")
        # Before rank 0 raises: the other ranks would wait for it in the first step.
        if failure is None:
            failure_text = None
        else:
            failure_text = str(failure) or repr(failure)
        failure_text = self._session.broadcast(failure_text, where="the opening of loggers")
        if failure is not None:
            raise failure
        if failure_text is not None:
            msg = f"the first rank could not open a logger: {failure_text}"
            raise ConfigError(msg)

    # -- the hot path ---------------------------------------------------------------------------

    def add(self, numbers: Mapping[str, Number], *, step: int, epoch: int) -> None:
        """Buffer numbers of a step, without waiting for the accelerator; the last value of a name counts."""
        if not self._loggers:
            return
        copies = {name: _copy_number(name, value) for name, value in numbers.items()}
        if self._rows:
            last_step, last_epoch, row = self._rows[-1]
            if last_step == step and last_epoch == epoch:
                row.update(copies)
                return
        self._rows.append((step, epoch, copies))

    def flush(self) -> None:
        rows, self._rows = self._rows, []
        if not rows:
            return
        tensors: list[Tensor] = []
        for *_, row in rows:
            tensors += [value for value in row.values() if isinstance(value, Tensor)]
        read = _read(tensors)
        known: list[tuple[int, int, dict[str, float]]] = []
        for step, epoch, row in rows:
            numbers = {n: next(read) if isinstance(value, Tensor) else value for n, value in row.items()}
            known.append((step, epoch, numbers))

        def send(logger: Logger) -> None:
            for step, epoch, numbers in known:
                logger.log(dict(numbers), step=step, epoch=epoch)  # its own, which it may keep and change
            logger.flush()

        self._each(send)

    # -- events, states, end ----------------------------------------------------------------------

    def event(self, kind: str, facts: Mapping[str, Any], *, step: int, epoch: int) -> None:
        """Log an event, after the numbers before it."""
        self.flush()
        self._each(lambda logger: logger.event(kind, facts, step=step, epoch=epoch))

    def close(self, status: RunStatus) -> None:
        """Send the rest and close every open logger. A failure is logged and not raised."""
        try:
            if self._is_open:
                self.flush()
                self._each(lambda logger: logger.close(status))
        except Exception:
            log.exception("the last numbers of the run could not be logged")
        self._is_open, self._loggers = False, []

    def state_dict(self) -> dict[str, Any]:
        """Send the rest, and return the loggers' states for a checkpoint, the same on all ranks.

        Collectives: one broadcast over several ranks.
        """
        if self._is_open:
            self.flush()
            for position in range(len(self._loggers)):
                # A logger that fails keeps its last state, for a resumed run.
                self._call(
                    position, lambda logger, at=position: self._last_states.update({at: logger.state_dict()})
                )
        states = [
            {"name": logger.name, "state": self._last_states.get(position, {})}
            for position, logger in enumerate(self._loggers)
        ]
        if self._session.world_size > 1:
            states = self._session.broadcast(states, where="states of loggers")
        return {"loggers": states}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the loggers from a checkpoint; loggers without a state there start fresh."""
        entries = list(state.get("loggers", []))
        for position, logger in enumerate(self._loggers):
            saved = next((entry for entry in entries if entry["name"] == logger.name), None)
            if saved is not None:
                entries.remove(saved)
                self._last_states[position] = saved["state"]
                logger.load_state_dict(saved["state"])

    # -- failures of loggers --------------------------------------------------------------------

    def _each(self, call: Any) -> None:
        for position in range(len(self._loggers)):
            self._call(position, call)

    def _call(self, position: int, call: Any) -> None:
        if position in self._failed:
            return
        logger = self._loggers[position]
        try:
            call(logger)
        except Exception:
            self._failed.add(position)
            log.exception("the logger %r failed and gets no more of this run; it continues", logger.name)
            with suppress(Exception):  # to release the lock of its file
                logger.close("failed")


def _copy_number(name: str, value: Any) -> Number:
    """Return a number, or a copy of a tensor on its accelerator: the original may change before the read."""
    if type(value) is float:  # most numbers of a step: a learning rate, a mean
        return value
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        if value.is_cpu:
            return float(value.item())
        return value.detach().reshape(()).clone()
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, Tensor):
        got = f"a tensor of shape {tuple(value.shape)}"
    else:
        got = f"{value!r:.100}"
    msg = f"what is logged must be numbers or tensors of one element; {name!r} is {got}"
    raise ConfigError(msg)


def _read(tensors: list[Tensor]) -> Any:
    """Yield the tensors' values in order: one transfer for each device and dtype."""
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for position, tensor in enumerate(tensors):
        groups.setdefault((tensor.device, tensor.dtype), []).append(position)
    values = [0.0] * len(tensors)
    for positions in groups.values():
        stacked = torch.stack([tensors[position] for position in positions]).tolist()
        for position, value in zip(positions, stacked, strict=True):
            values[position] = float(value)
    return iter(values)


# -- The log that `fit` and `loop` asked for --------------------------------------------------------


def plan_log(preparation: Preparation, settings: LoopSettings, optimizers: Iterable[Optimizer]) -> RunLog:
    """Return the log of a run. A run with loggers and a checkpoint folder also gets a ``log.jsonl`` there."""
    session, selection = preparation.session, preparation.selection
    checkpoint, options = settings.checkpoint, settings.log
    if checkpoint is None:
        folder = None
    else:
        folder = Path(checkpoint.folder).absolute()
    if options.loggers is None:
        loggers = []
    else:
        loggers = make_loggers(options.loggers, preparation.plugins)
    if loggers and folder is not None and not any(isinstance(one, JsonLinesLogger) for one in loggers):
        loggers.append(JsonLinesLogger())
    if loggers or folder is not None:
        config = config_in_use()
    else:
        config = None
    if config is not None and folder is not None:
        loggers.append(ConfigLogger(folder, config[1]))

    hyperparameters = _hyperparameters(preparation, settings.limits, optimizers)

    def facts() -> dict[str, Any]:
        return {
            "hyperparameters": mask_secrets(
                {**hyperparameters, **(config[0] if config else {}), **(options.hyperparameters or {})}
            ),
            "environment": environment(),
            "selection": str(selection),
            "candidates": candidates(selection),
            "versions": versions(),
        }

    return RunLog(session, loggers, every_steps=options.every_steps, folder=folder, facts=facts)


def _hyperparameters(
    preparation: Preparation, limits: Limits, optimizers: Iterable[Optimizer]
) -> dict[str, Any]:
    """Return the hyperparameters that the trainer knows itself."""
    session, compiled = preparation.session, preparation.compile_options
    hyperparameters = {
        "epochs": limits.epochs,
        "max_steps": limits.max_steps,
        "precision": preparation.precision,
        "accumulate": session.job.accumulate,
        "seed": preparation.seed,
        "world_size": session.world_size,
        "backend": preparation.selection.chosen.name,
    }
    if compiled is not None:
        if compiled.blocks:
            hyperparameters["compile"] = "blocks"
        else:
            hyperparameters["compile"] = "model"
    if session.job.recomputation is not None:
        hyperparameters["recomputation"] = session.job.recomputation
    for optimizer in optimizers:
        hyperparameters |= _of_optimizer(optimizer)
    return hyperparameters


def _of_optimizer(optimizer: Optimizer) -> dict[str, Any]:
    """Return the class name of an optimizer, and its first group's settings, as they were asked for."""
    group = dict(optimizer.param_groups[0])
    # A schedule has changed the group's own values by now, as a warm-up does when it is made.
    group["lr"] = group.pop("initial_lr", group.get("lr"))
    for name in ("lr", "momentum"):
        if f"max_{name}" in group:  # a cycle keeps its own limits in the group, and nothing of before
            group[name] = optimizer.defaults.get(name)
    plain = {name: value for name, value in group.items() if isinstance(value, bool | int | float | str)}
    return {"optimizer": type(optimizer).__name__, **plain}
