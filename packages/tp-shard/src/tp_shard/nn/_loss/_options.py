"""What makes the loss of a row, and the targets of some rows as one rank sees them."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tp_shard._groups._group import Group
from tp_shard._split import bounds

__all__ = ["LossOptions", "Rows", "computed_in", "returned_in"]


@dataclass(frozen=True, slots=True, eq=False)
class LossOptions:
    """What makes the loss of a row.

    Attributes:
        num_classes: Over all ranks.
        weight: A factor for each class, of shape (num_classes,), in the type that is computed in.
        ignore_index: Targets that count for nothing.
        label_smoothing: How much of a target is spread over all classes.
        reduction: "mean", "sum" or "none".
        z_loss: The factor of the squared logarithm of the softmax's denominator.
        group: Who holds the logits together.
        layer: Who communicates, for messages.
        sampled: Which of this rank's classes have logits, as sorted indices into its shard; ``None``
            for all of them. Every target of a class of this rank is among them.
        num_sampled: How many have logits over all ranks; read where ``sampled`` is given and labels are
            smoothed.
    """

    num_classes: int
    weight: Tensor | None
    ignore_index: int
    label_smoothing: float
    reduction: str
    z_loss: float
    group: Group
    layer: Any
    sampled: Tensor | None = None
    num_sampled: int = 0

    @property
    def bounds(self) -> tuple[int, int]:
        """Where this rank's classes begin and end."""
        return bounds(self.num_classes, self.group.size, self.group.rank)

    @property
    def local_weight(self) -> Tensor | None:
        """The factors of this rank's classes."""
        start, stop = self.bounds
        return None if self.weight is None else self.weight[start:stop]

    @property
    def spread(self) -> float:
        """How much of a target goes to each class that has a logit."""
        if self.label_smoothing == 0:
            return 0.0
        return self.label_smoothing / (self.num_classes if self.sampled is None else self.num_sampled)

    @property
    def columns(self) -> int:
        """How many numbers per row travel."""
        return 4 if self.label_smoothing > 0 else 3


class Rows:
    """The targets of some rows, as one rank sees them. All tensors have shape (rows,).

    Attributes:
        target: The classes.
        valid: Which rows count.
        mine: Which targets are classes of this rank.
        index: Where they are among this rank's logits, 0 for others.
        factor: The weight of the target's class, 0 for rows that do not count.
    """

    __slots__ = ("factor", "index", "mine", "target", "valid")

    def __init__(self, target: Tensor, options: LossOptions, dtype: torch.dtype) -> None:
        start, stop = options.bounds
        self.target = target
        self.valid = target != options.ignore_index
        self.mine = self.valid & (target >= start) & (target < stop)
        index = target - start
        if options.sampled is not None:
            index = torch.searchsorted(options.sampled, index)
        self.index = torch.where(self.mine, index, 0)
        if options.weight is None:
            self.factor = self.valid.to(dtype)
        else:
            safe = torch.where(self.valid, target, 0).clamp_(0, options.num_classes - 1)
            self.factor = torch.where(self.valid, options.weight[safe], 0)

    def part(self, start: int, stop: int) -> "Rows":
        """Return some of the rows, as views."""
        rows = Rows.__new__(Rows)
        for name in self.__slots__:
            setattr(rows, name, getattr(self, name)[start:stop])
        return rows


def computed_in(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which a loss of logits of ``dtype`` is computed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def returned_in(logits: Tensor, dtype: torch.dtype) -> torch.dtype:
    """Return the type of the loss: the logits', as torch's own loss has it, and under autocast ``dtype``."""
    return dtype if torch.is_autocast_enabled(logits.device.type) else logits.dtype
