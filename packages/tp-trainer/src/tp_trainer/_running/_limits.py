"""How long a run goes on, and when it validates in between."""

import re
from dataclasses import dataclass

from tp_core.errors import ConfigError

from tp_trainer._checks._values import check_not_negative, check_positive

__all__ = ["Limits", "seconds_of"]

_UNITS = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0}
_TIME = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([dhms])")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How long a run goes on, and when it validates in between.

    Attributes:
        epochs: How often to go through the loader; ``None`` for as long as the other limits let it, and once
            where there is no other that ends the run.
        steps_per_epoch: How many batches make an epoch; ``None`` for all that the loader has.
        max_steps: After how many optimizer steps the run ends, those before a resume included.
        max_time: For how long this call trains: seconds, or text such as "1h30m".
        val_every_steps: Validate after so many optimizer steps too, not at the ends of epochs alone.
        sanity_val_batches: On how many batches to try the validation before the first step.
        overfit_batches: Train on so many batches alone, the same ones in every epoch.
        restart_stream: Whether every epoch begins a stream anew, instead of going on in it.

    Raises:
        ConfigError: A value is out of its range.
    """

    epochs: int | None = None
    steps_per_epoch: int | None = None
    max_steps: int | None = None
    max_time: float | str | None = None
    val_every_steps: int | None = None
    sanity_val_batches: int = 0
    overfit_batches: int | None = None
    restart_stream: bool = False

    def __post_init__(self) -> None:
        for name in ("epochs", "steps_per_epoch", "max_steps", "val_every_steps", "overfit_batches"):
            value = getattr(self, name)
            if value is not None:
                check_positive(name, value)
        check_not_negative("sanity_val_batches", self.sanity_val_batches)
        if self.max_time is not None:
            seconds_of(self.max_time)
        if self.epochs is None and self.max_steps is None and self.max_time is None:
            object.__setattr__(self, "epochs", 1)  # frozen dataclasses refuse plain assignment

    @property
    def max_seconds(self) -> float | None:
        """For how many seconds this call trains; ``None`` for any time."""
        return None if self.max_time is None else seconds_of(self.max_time)


def seconds_of(time: object) -> float:
    """Return a time in seconds.

    Args:
        time: A number of seconds, or text: "90s", "1h30m", "2d", "01:30:00".

    Raises:
        ConfigError: ``time`` is something else, or not above 0.

    Example:
        >>> seconds_of("1h30m"), seconds_of("00:01:30"), seconds_of(5)
        (5400.0, 90.0, 5.0)
    """
    seconds = _parsed(time) if isinstance(time, str) else time
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
        msg = (
            "max_time must be a number of seconds above 0, or text such as '1h30m' or '01:30:00', got "
            f"{time!r}"
        )
        raise ConfigError(msg)
    return float(seconds)


def _parsed(text: str) -> float | None:
    if re.fullmatch(r"\d+:\d\d:\d\d", text):
        hours, minutes, seconds = map(int, text.split(":"))
        return hours * 3600.0 + minutes * 60.0 + seconds
    found = _TIME.findall(text)
    if not found or _TIME.sub("", text).strip():
        return None
    return sum(float(number) * _UNITS[unit] for number, unit in found)
