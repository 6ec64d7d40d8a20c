"""The optimizers and schedulers that ``configure_optimizers`` returns, in any of its forms."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau
from tp_core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class LearningRateSchedule:
    """A scheduler, and when it steps: the fields of Lightning's dict."""

    scheduler: Any
    interval: str = "epoch"
    frequency: int = 1
    monitor: str | None = None
    strict: bool = True
    on_plateau: bool = False
    name: str | None = None


def configured(returned: Any) -> tuple[list[Optimizer], list[LearningRateSchedule]]:
    """Return the optimizers and schedulers of what ``configure_optimizers`` returned, in any of its forms."""
    if isinstance(returned, Optimizer):
        return [returned], []
    if isinstance(returned, Mapping) and "optimizer" in returned:
        if returned.get("lr_scheduler") is not None:
            schedulers = [returned["lr_scheduler"]]
        else:
            schedulers = []
        return [returned["optimizer"]], [_make_schedule(s, returned.get("monitor")) for s in schedulers]
    if isinstance(returned, list | tuple) and returned:
        if all(isinstance(item, Optimizer) for item in returned):
            return list(returned), []
        if len(returned) == 2 and all(isinstance(part, list | tuple) for part in returned):
            return list(returned[0]), [_make_schedule(item) for item in returned[1]]
        if all(isinstance(item, Mapping) for item in returned):
            pairs = [configured(item) for item in returned]
            return [o for os, _ in pairs for o in os], [s for _, ss in pairs for s in ss]
    msg = (
        f"configure_optimizers() has returned {type(returned).__name__}; return an optimizer, a list of "
        "them, two lists, or a dict with 'optimizer' and 'lr_scheduler'"
    )
    raise ConfigError(msg)


def _make_schedule(schedule: Any, monitor: str | None = None) -> LearningRateSchedule:
    if isinstance(schedule, Mapping):
        fields = dict(schedule)
    else:
        fields = {"scheduler": schedule}
    plateau = fields.pop("reduce_on_plateau", isinstance(fields["scheduler"], ReduceLROnPlateau))
    fields.setdefault("monitor", monitor)
    unknown = fields.keys() - set(LearningRateSchedule.__slots__)
    if unknown:
        names = LearningRateSchedule.__slots__
        msg = f"the dict of a scheduler has {', '.join(sorted(unknown))}, and may have {names}"
        raise ConfigError(msg)
    return LearningRateSchedule(**fields, on_plateau=plateau)


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """Return the parameters of all groups."""
    return [p for group in optimizer.param_groups for p in group["params"]]
