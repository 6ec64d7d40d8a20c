"""Which rank this process is, and what ranks exchange."""

from collections.abc import Sequence
from typing import Literal, TypeVar

from torch import Tensor

from tp_core.errors import DisagreementError

__all__ = ["RankSession", "ReduceOp"]

T = TypeVar("T")
ReduceOp = Literal["sum", "mean", "min", "max"]
"""How the tensors of several ranks become one, element by element."""


class RankSession:
    """One rank's place among all, and its collectives; here of one process."""

    @property
    def rank(self) -> int:
        """The rank of this process among all, from 0."""
        return 0

    @property
    def world_size(self) -> int:
        """How many processes run the job."""
        return 1

    @property
    def local_rank(self) -> int:
        """The rank of this process among those of its host, from 0."""
        return 0

    @property
    def data_rank(self) -> int:
        """Which share of the data is this process's, from 0."""
        return self.rank

    @property
    def data_size(self) -> int:
        """Into how many shares the data is split."""
        return self.world_size

    @property
    def is_main(self) -> bool:
        """Whether this process writes the files and speaks to the terminal."""
        return self.rank == 0

    def reduce(self, value: Tensor, op: ReduceOp = "sum") -> Tensor:  # noqa: ARG002 - contract
        """Return ``value`` reduced over the data ranks, on all of them; the argument is kept.

        Args:
            value: A tensor, of one shape and type on all data ranks.
            op: How its elements are reduced: "sum", "mean", "min" or "max".

        Collectives: one all-reduce over the data ranks.
        """
        return value

    def gather(self, value: Tensor) -> Tensor:
        """Return the data ranks' tensors concatenated along dim 0; their lengths may differ.

        Args:
            value: This rank's rows, (rows, ...); all but the first dimension is equal on all data ranks.

        Returns:
            The rows of all data ranks in their order, (rows of all, ...), on each of them.

        Collectives: all-gathers over the data ranks.
        """
        return value

    def gather_objects(self, value: T) -> list[T]:
        """Return every rank's object, in the order of the ranks.

        Collectives: one all-gather of pickled objects over all ranks.
        """
        return [value]

    def broadcast(self, value: T, *, src: int = 0) -> T:  # noqa: ARG002 - contract
        """Return the object of rank ``src``, on all ranks.

        Collectives: one broadcast of a pickled object over all ranks.
        """
        return value

    def barrier(self) -> None:
        """Wait until every rank is here.

        Collectives: one barrier over all ranks.
        """

    def check_agreement(
        self, what: str, value: object, *, remedy: str = "start every rank with the same script and arguments"
    ) -> None:
        """Make sure that all ranks have the same ``value``.

        Args:
            what: The words for it in the message.
            value: Something small that pickles and compares.
            remedy: What to do where ranks disagree.

        Raises:
            DisagreementError: On every rank, if they differ.

        Collectives: those of :meth:`gather_objects`.
        """
        questions, values = zip(*self.gather_objects((what, value)), strict=True)
        other = _first_other(questions)
        if other is not None:
            msg = (
                f"ranks are at different places: rank 0 compares {questions[0]}, rank {other} compares "
                f"{questions[other]}. Every rank must make the same calls in the same order"
            )
            raise DisagreementError(msg)
        other = _first_other(values)
        if other is not None:
            msg = (
                f"ranks disagree on {what}: rank 0 has {values[0]!r}, rank {other} has "
                f"{values[other]!r}; {remedy}"
            )
            raise DisagreementError(msg)


def _first_other(values: Sequence[object]) -> int | None:
    """Return the first rank whose value is not that of rank 0."""
    return next((rank for rank, value in enumerate(values) if value != values[0]), None)
