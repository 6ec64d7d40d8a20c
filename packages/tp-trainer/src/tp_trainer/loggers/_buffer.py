"""What a run measures, on its way to the loggers: kept as tensors, and read together now and then."""

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from tp_core.errors import ConfigError
from tp_core.plugins import Logger, RunInfo, RunStatus

from tp_trainer._checks import check_positive

log = logging.getLogger("tp_trainer")

Number = float | Tensor


class LogBuffer:
    """Takes the numbers of steps and hands them to loggers, every so many steps and at ends.

    An accelerator is not waited for when a number is added: its value is copied where it is, and all that
    have come together are read in one transfer by :meth:`flush`. Numbers of one step are one row.

    A logger that raises once the run has begun is named in the log, left out from then on, and ends nothing:
    hours of training are worth more than its rows. One that raises while it is opened ends the run.

    Args:
        loggers: Where the numbers go; none on all ranks but the first, where every call returns at once.
        every_steps: After how many optimizer steps what was kept is read.

    Raises:
        ConfigError: ``every_steps`` is not a whole number from 1.
    """

    def __init__(self, loggers: Sequence[Logger], *, every_steps: int = 50) -> None:
        check_positive("log_every_steps", every_steps)
        self.every_steps = every_steps
        self._loggers = list(loggers)
        self._failed: set[int] = set()
        self._rows: list[tuple[int, int, dict[str, Number]]] = []
        self._last_states: dict[int, dict[str, Any]] = {}
        self._is_open = False

    def __bool__(self) -> bool:
        return bool(self._loggers)

    def open(self, info: RunInfo) -> None:
        """Open every logger; where one cannot be opened, those before it are closed again."""
        opened: list[Logger] = []
        try:
            for logger in self._loggers:
                logger.open(info)
                opened.append(logger)
            self._is_open = True
        except BaseException:
            for logger in opened:
                logger.close("failed")
            raise

    # -- the hot path ---------------------------------------------------------------------------

    def add(self, numbers: Mapping[str, Number], *, step: int, epoch: int) -> None:
        """Keep numbers of a step; of one name the last of a step counts.

        Raises:
            ConfigError: A value is not a number or a tensor of one element.
        """
        if not self._loggers:
            return
        kept = {name: _kept(name, value) for name, value in numbers.items()}
        if self._rows and self._rows[-1][:2] == (step, epoch):
            self._rows[-1][2].update(kept)
        else:
            self._rows.append((step, epoch, kept))

    def is_due(self, step: int) -> bool:
        """Whether what was kept is to be read after this step."""
        return step % self.every_steps == 0

    def flush(self) -> None:
        """Read what was kept and hand it to the loggers."""
        rows, self._rows = self._rows, []
        if not rows:
            return
        read = _read([value for *_, row in rows for value in row.values() if isinstance(value, Tensor)])
        for step, epoch, row in rows:
            numbers = {n: next(read) if isinstance(v, Tensor) else v for n, v in row.items()}
            self._each(lambda logger, n=numbers, s=step, e=epoch: logger.log(n, step=s, epoch=e))
        self._each(lambda logger: logger.flush())

    # -- what happens beside --------------------------------------------------------------------

    def event(self, kind: str, facts: Mapping[str, Any], *, step: int, epoch: int) -> None:
        """Note what happened, after the numbers before it."""
        self.flush()
        self._each(lambda logger: logger.event(kind, facts, step=step, epoch=epoch))

    def close(self, status: RunStatus) -> None:
        """Hand over what is left and close every logger that is open."""
        if self._is_open:
            self.flush()
            self._each(lambda logger: logger.close(status))
        self._is_open, self._loggers = False, []

    def state_dict(self) -> dict[str, Any]:
        """Hand over what is left, and return what the loggers need to go on; for a checkpoint."""
        if self._is_open:
            self.flush()
            states: dict[int, dict[str, Any]] = {}
            self._each(lambda logger: states.update({self._position(logger): logger.state_dict()}))
            self._last_states |= states  # one that failed goes on where it was, in the next part of the run
        return {
            "loggers": [
                {"name": logger.name, "state": self._last_states.get(position, {})}
                for position, logger in enumerate(self._loggers)
            ]
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Give loggers what they left in a checkpoint; those that were not there begin anew."""
        left = list(state.get("loggers", []))
        for position, logger in enumerate(self._loggers):
            found = next((entry for entry in left if entry["name"] == logger.name), None)
            if found is not None:
                left.remove(found)
                self._last_states[position] = found["state"]
                logger.load_state_dict(found["state"])

    # -- loggers that break ---------------------------------------------------------------------

    def _position(self, logger: Logger) -> int:
        return next(i for i, other in enumerate(self._loggers) if other is logger)

    def _each(self, call: Any) -> None:
        for position, logger in enumerate(self._loggers):
            if position in self._failed:
                continue
            try:
                call(logger)
            except Exception:
                self._failed.add(position)
                log.exception("the logger %r failed and gets no more of this run, which goes on", logger.name)
                with suppress(Exception):  # its file belongs to this run until it is closed
                    logger.close("failed")


def _kept(name: str, value: Any) -> Number:
    """Return a number, or a tensor on an accelerator that nobody changes."""
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        if value.device.type == "cpu":
            return float(value.item())
        return value.detach().reshape(()).clone()
    if isinstance(value, Real):
        return float(value)
    what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"{value!r:.100}"
    msg = f"what is logged must be numbers or tensors of one element; {name!r} is {what}"
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
