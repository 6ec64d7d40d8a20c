"""What two ranks cannot tell from what is right: exchanges between more of them."""

from typing import Any, ClassVar

import torch
from torch import Tensor

from tp_core.testing._bodies import open_session
from tp_core.testing._kit import PooledKit
from tp_core.testing._ranks import run_ranks

__all__ = ["ExchangeChecks"]

OPERATIONS: tuple[Any, ...] = ("sum", "mean", "min", "max")
_found: dict[type, list[Any]] = {}  # here and not on the classes, which are sent to the ranks


class ExchangeChecks(PooledKit):
    """Where each rank has one other, halving is a mean, and the other one is all others.

    Attributes:
        exchange_processes: On how many ranks exchanges are looked at, beside those of ``processes``; fewer
            where there are no more devices, another number where a backend needs it. A backend for one
            process is not asked.
    """

    exchange_processes: ClassVar[int] = 3

    def exchanged(self) -> list[dict[str, Any]]:
        """Return what each of the ranks got; they are started once."""
        kit = type(self)
        if kit not in _found:
            ranks = self.exchange_processes if self.processes > 1 else 1
            _found[kit] = run_ranks(_exchange, ranks, self) if ranks > 1 else [_exchange(self)]
        return _found[kit]

    def test_reductions_are_those_of_all_ranks_where_there_are_more_than_two(self) -> None:
        for found in self.exchanged():
            values = torch.stack([_mine(rank) for rank in range(found["data_size"])])
            expected = {
                "sum": values.sum(0),
                "mean": values.mean(0),
                "min": values.amin(0),
                "max": values.amax(0),
            }
            for op, tensor in expected.items():
                torch.testing.assert_close(found[op], tensor)

    def test_gathers_have_the_rows_of_all_ranks_where_there_are_more_than_two(self) -> None:
        for found in self.exchanged():
            parts = [_mine(rank)[:rank] for rank in range(found["data_size"])]
            torch.testing.assert_close(found["rows"], torch.cat(parts))

    def test_objects_come_from_every_rank_where_there_are_more_than_two(self) -> None:
        ranks = len(self.exchanged())
        for found in self.exchanged():
            assert found["objects"] == [str(rank) for rank in range(ranks)]
            assert found["broadcasts"] == [str(source) for source in range(ranks)]


def _mine(rank: int) -> Tensor:
    """Return values of which each rank has the largest or the smallest somewhere."""
    return torch.tensor([(rank * 5) % 3, (rank * 2 + 1) % 3, -rank, rank**2], dtype=torch.float64)


# -- on every rank --------------------------------------------------------------------------------


def _exchange(kit: ExchangeChecks) -> dict[str, Any]:
    with open_session(kit) as session:
        mine = _mine(session.data_rank).to(session.device)
        rows = mine[: session.data_rank]
        return {
            "data_size": session.data_size,
            "rows": session.gather(rows).cpu(),
            "objects": session.gather_objects(str(session.rank)),
            "broadcasts": [
                session.broadcast(str(session.rank), src=src) for src in range(session.world_size)
            ],
            **{op: session.reduce(mine, op).cpu() for op in OPERATIONS},
        }
