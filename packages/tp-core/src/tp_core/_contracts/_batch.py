"""A batch in contracts: its parts for several devices, a rank's share of it, the output of a step on it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

from torch import Tensor

from tp_core.errors import ConfigError, StepError

StepOutput = Tensor | Mapping[str, Any]
"""The output of a step: the loss, a scalar tensor, or a dict of values by name with the loss as "loss"."""

LossReduction = Literal["mean", "sum"]
"""The reduction of a loss over its samples."""


@dataclass(frozen=True, slots=True)
class Share:
    """The size of one data rank's share of a global batch.

    Attributes:
        samples: Samples of this rank; 0 for a stand-in that must not count.
        total: Samples of all data ranks together.
    """

    samples: int
    total: int


class Parts(tuple[Any, ...]):
    """One batch for each device that takes part, with the number of samples in each part.

    Attributes:
        counts: The number of samples in each part, in the order of the parts.
        order: The position of each sample of the concatenated parts in the original list; ``None``
            when the parts keep the order.
    """

    counts: tuple[int, ...]
    order: tuple[int, ...] | None

    def __new__(
        cls,
        parts: Sequence[Any],
        *,
        counts: Sequence[int],
        order: Sequence[int] | None = None,
    ) -> Self:
        """Make the parts.

        Args:
            parts: One batch for each device that takes part.
            counts: The number of samples in each part.
            order: The position of each sample of the concatenated parts in the original list; ``None`` if
                they keep the order.

        Raises:
            ConfigError: The number of counts is not the number of parts.
        """
        if len(parts) != len(counts):
            msg = f"{len(parts)} parts need as many sample counts, got {len(counts)}: {counts!r}"
            raise ConfigError(msg)
        self = super().__new__(cls, parts)
        self.counts = tuple(counts)
        self.order = None if order is None else tuple(order)
        return self

    def map(self, function: Callable[[Any], Any]) -> Self:
        """Return parts, of this type and these counts, with ``function(part)`` for each part."""
        mapped = [function(tuple.__getitem__(self, i)) for i in range(len(self))]
        return type(self)(mapped, counts=self.counts, order=self.order)

    def __getitem__(self, index: Any) -> Any:
        """Return a part by its number.

        Raises:
            StepError: ``index`` is a key, as for one batch: the batch is in parts.
        """
        if isinstance(index, str):
            raise StepError(self._taken_for_a_batch(f"has no {index!r}"))
        return tuple.__getitem__(self, index)

    def _taken_for_a_batch(self, what: str) -> str:
        return (
            f"this batch is in {len(self)} parts, one for each device, and {what}: give it as it is to "
            "trainer.run(step, model, batch), which calls step(model, part) on each device; or take a "
            "backend with whole batches: Trainer(backend='dp-gather'), or one process per device"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        # Batches of a loader's workers are pickled; a tuple's own way would call __new__ without counts.
        return _rebuild_parts, (self[:], self.counts, self.order)


def _rebuild_parts(parts: tuple[Any, ...], counts: tuple[int, ...], order: tuple[int, ...] | None) -> Parts:
    return Parts(parts, counts=counts, order=order)
