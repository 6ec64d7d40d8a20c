"""What a backend says of its layouts before anything starts: its axes, its work and its collectives.

A layout puts a job on ranks. A backend lists those that it can make of this many ranks, and forecasts for
each the memory of the fullest rank and what a rank does in a step. It says sizes; links and rates, which
make seconds of them, belong to the machine.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, get_args

from tp_core._contracts._job import MemoryNeed
from tp_core.errors import ConfigError

Axis = Literal["data", "fsdp", "context", "pipeline", "tensor"]
"""The axes of a mesh, the outermost first: ranks of the last one are neighbors."""

CollectiveKind = Literal["all-reduce", "all-gather", "reduce-scatter", "all-to-all", "send"]
Phase = Literal["forward", "backward", ""]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A way to put a job on ranks.

    Attributes:
        axes: The number of ranks along each axis; an axis that is left out has one.
        options: The options of backends by name, as a trainer takes them.
        setup: The line that a script needs before it makes the trainer's model; empty for none.

    Raises:
        ConfigError: An axis has another name, or fewer ranks than one.

    Example:
        >>> Layout(axes={"data": 2, "tensor": 4}).ranks
        8
    """

    axes: Mapping[Axis, int]
    options: Mapping[str, Mapping[str, object]] = field(default_factory=lambda: MappingProxyType({}))
    setup: str = ""

    def __post_init__(self) -> None:
        known = get_args(Axis)
        for axis, ranks in self.axes.items():
            if axis not in known or ranks < 1:
                msg = (
                    f"an axis of a layout is one of {', '.join(known)}, with ranks from 1, got {axis}={ranks}"
                )
                raise ConfigError(msg)

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        count = 1
        for ranks in self.axes.values():
            count *= ranks
        return count

    @property
    def readers(self) -> int:
        """The number of parts into which the samples of a batch are divided."""
        return self.axes.get("data", 1) * self.axes.get("fsdp", 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """Collectives of one kind in what a rank does for a batch.

    Attributes:
        kind: The kind.
        nbytes: The bytes of the whole tensor: of what is reduced, gathered, exchanged or sent.
        ranks: The number of ranks that take part.
        stride: The distance between neighbors among them: 1 for consecutive ranks.
        times: How many there are.
        hidden_by: The pass that runs meanwhile, all of its operators but one; empty for none.
        per_step: Whether they come once for an optimizer step, and not for each batch of it.
        is_packed: Whether tensors are copied into the one that is exchanged, or out of it.
    """

    kind: CollectiveKind
    nbytes: int
    ranks: int
    stride: int = 1
    times: int = 1
    hidden_by: Phase = ""
    per_step: bool = False
    is_packed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """What a rank does for a batch, beside a device that computes the samples of one reader alone.

    Attributes:
        operations: The part of the operations that the fullest rank computes.
        starts: The part of the operators that it starts; above 1 where it computes in smaller pieces.
        imbalance: How many times as much as the mean of all ranks the fullest one computes.
        bubble: The time for which it waits for other stages, as a part of the time that it computes.
        is_sharded: Whether the optimizer steps DTensors.
        transfers: Its collectives.
    """

    operations: float = 1.0
    starts: float = 1.0
    imbalance: float = 1.0
    bubble: float = 0.0
    is_sharded: bool = False
    transfers: tuple[Transfer, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What a layout needs.

    Attributes:
        memory: The memory of the fullest rank.
        work: What a rank does for a batch.
    """

    memory: MemoryNeed
    work: StepWork


# -- What several backends say alike ----------------------------------------------------------------


BUCKET_NBYTES = 25 * 2**20
"""The size of a bucket of gradients, as torch's DistributedDataParallel has it."""


def divisors(ranks: int, *, least: int = 2) -> list[int]:
    """Return the numbers that divide ``ranks``, from ``least`` on.

    Example:
        >>> divisors(12)
        [2, 3, 4, 6, 12]
    """
    return [n for n in range(least, ranks + 1) if ranks % n == 0]


def averaged_gradients(nbytes: int, ranks: int, *, stride: int = 1) -> tuple[Transfer, ...]:
    """Return the all-reduces of gradients in buckets, during the last backward pass of a step."""
    if ranks == 1 or not nbytes:
        return ()
    buckets = -(-nbytes // BUCKET_NBYTES)
    size = nbytes // buckets
    return (
        Transfer(
            kind="all-reduce",
            nbytes=size,
            ranks=ranks,
            stride=stride,
            times=buckets,
            hidden_by="backward",
            per_step=True,
        ),
    )
