"""The ranks of a backend know their numbers, and exchange what they have."""

import math
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from tp_core._contracts._session import Session
from tp_core.errors import DisagreementError
from tp_core.testing._bodies import make_job, open_session
from tp_core.testing._kit import PooledKit

__all__ = ["RankChecks"]

TURNS = 20  # of a rank that waits, after which the one that comes last comes
DEADLINE_S = 60.0  # for these turns: a barrier that lets no other thread run is a barrier too
TYPES = [torch.float64, torch.float32, torch.int64]


class RankChecks(PooledKit):
    """What is exchanged besides gradients."""

    def test_ranks_know_who_they_are(self) -> None:
        found = self.everywhere(_who)
        assert [who["rank"] for who in found] == list(range(self.processes))
        assert [who["is_main"] for who in found] == [rank == 0 for rank in range(self.processes)]
        assert {who["world_size"] for who in found} == {self.processes}
        assert all(who["local_rank"] == who["local_rank_of_launcher"] for who in found)
        assert all(0 <= who["data_rank"] < who["data_size"] for who in found)
        assert {who["data_rank"] for who in found} == set(range(found[0]["data_size"]))
        assert all(who["is_its_device"] for who in found), "it computes on a device that it was not given"

    def test_ranks_of_several_hosts_know_who_they_are(self) -> None:
        found = self.everywhere(_who_on_hosts)
        assert [who["rank"] for who in found] == list(range(self.processes))
        assert [who["is_main"] for who in found] == [rank == 0 for rank in range(self.processes)]
        assert [who["local_rank"] for who in found] == [0] * self.processes

    @pytest.mark.parametrize("dtype", TYPES, ids=str)
    @pytest.mark.parametrize("op", ["sum", "mean", "min", "max"])
    def test_reduce_knows_every_operation(self, op: str, dtype: torch.dtype) -> None:
        if op == "mean" and not dtype.is_floating_point:
            dtype = torch.float64  # a mean of whole numbers is none
        for size, found in self.everywhere(_reduced, op, dtype):
            values = torch.stack([_of_rank(rank, dtype) for rank in range(size)])
            rtol = 1e-6 if dtype == torch.float32 else 1e-12
            torch.testing.assert_close(found, _REDUCTIONS[op](values), rtol=rtol, atol=0.0)

    def test_reduce_keeps_its_argument(self) -> None:
        assert all(self.everywhere(_kept_argument))

    def test_reduce_takes_a_scalar(self) -> None:
        for size, found in self.everywhere(_reduced_scalar):
            torch.testing.assert_close(found, torch.tensor(size * (size + 1) / 2, dtype=torch.float64))

    @pytest.mark.parametrize("dtype", [*TYPES, torch.bool], ids=str)
    @pytest.mark.parametrize("fewest", [0, 1])
    def test_gather_takes_uneven_lengths(self, fewest: int, dtype: torch.dtype) -> None:
        for size, found in self.everywhere(_gathered, fewest, dtype):
            expected = torch.cat([_rows(rank, fewest, dtype) for rank in range(size)])
            torch.testing.assert_close(found, expected)

    def test_gather_takes_scalars(self) -> None:
        for size, found in self.everywhere(_gathered_scalars):
            torch.testing.assert_close(found.reshape(-1), torch.arange(float(size)))

    @pytest.mark.parametrize("shape", [(2, 3, 2), (0, 3)], ids=str)
    def test_gather_and_reduce_take_any_shape_and_layout(self, shape: tuple[int, ...]) -> None:
        for size, gathered, reduced in self.everywhere(_of_shape, shape):
            parts = [_laid_out(shape, rank) for rank in range(size)]
            torch.testing.assert_close(gathered, torch.cat(parts))
            torch.testing.assert_close(reduced, torch.stack(parts).sum(0))

    def test_gather_objects_keeps_the_order_of_the_ranks(self) -> None:
        expected = [{"rank": rank, "text": "x" * rank} for rank in range(self.processes)]
        assert self.everywhere(_gathered_objects) == [expected] * self.processes

    def test_broadcast_gives_every_rank_the_object_of_its_source(self) -> None:
        expected = [{"from": source} for source in range(self.processes)]
        assert self.everywhere(_broadcast) == [expected] * self.processes

    def test_a_barrier_waits_for_every_rank(self, tmp_path: Any) -> None:
        log = tmp_path / "barrier"
        log.touch()
        self.everywhere(_meet, str(log))
        for round_ in range(self.processes):
            words = [word for number, _, word in _lines(log) if number == round_ and word != "turn"]
            assert words == ["before"] * self.processes + ["after"] * self.processes, (
                f"in round {round_} a rank went on before all had come"
            )

    def test_disagreement_is_told_on_every_rank(self) -> None:
        for agreed, message in self.everywhere(_disagreed):
            assert agreed
            assert self.processes == 1 or "ranks disagree on the number" in message


_REDUCTIONS: Any = {
    "sum": lambda values: values.sum(0),
    "mean": lambda values: values.mean(0),
    "min": lambda values: values.amin(0),
    "max": lambda values: values.amax(0),
}


def _of_rank(rank: int, dtype: torch.dtype) -> Tensor:
    """Return values of which neither the first nor the last rank has all the largest."""
    values = torch.tensor([[rank + 1, -rank], [(rank - 1) ** 2, 7]], dtype=dtype)
    return values / 3 if dtype.is_floating_point else values


def _rows(rank: int, fewest: int, dtype: torch.dtype) -> Tensor:
    return (torch.arange(2 * (rank + fewest)).reshape(-1, 2) + rank).to(dtype)


def _laid_out(shape: tuple[int, ...], rank: int) -> Tensor:
    """Return a tensor of that shape whose elements do not lie in order."""
    size = math.prod(shape)
    backwards = torch.arange(float(size)).reshape(shape[::-1])
    return backwards.permute(*range(len(shape))[::-1]) + rank


# -- on every rank --------------------------------------------------------------------------------


def _who(kit: RankChecks) -> dict[str, Any]:
    with open_session(kit) as session:
        names = ("rank", "world_size", "local_rank", "data_rank", "data_size", "is_main")
        return {name: getattr(session, name) for name in names} | {
            "local_rank_of_launcher": make_job(kit).environment.local_rank,
            "is_its_device": session.device in session.job.devices,
        }


def _who_on_hosts(kit: RankChecks) -> dict[str, Any]:
    """Look at a session as on as many hosts as there are ranks, where each is the first of its own."""
    if kit.processes == 1:
        return _who(kit)
    hosts = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": os.environ["RANK"]}
    with patch.dict(os.environ, hosts):
        return _who(kit)


def _reduced(kit: RankChecks, op: Any, dtype: torch.dtype) -> tuple[int, Tensor]:
    with open_session(kit) as session:
        mine = _of_rank(session.data_rank, dtype).to(session.device)
        return session.data_size, session.reduce(mine, op).cpu()


def _kept_argument(kit: RankChecks) -> bool:
    with open_session(kit) as session:
        mine = _of_rank(session.data_rank, torch.float64).to(session.device)
        before = mine.clone()
        for op in ("sum", "mean", "min", "max"):
            session.reduce(mine, op)
        return torch.equal(mine, before)


def _reduced_scalar(kit: RankChecks) -> tuple[int, Tensor]:
    with open_session(kit) as session:
        mine = torch.tensor(session.data_rank + 1.0, dtype=torch.float64, device=session.device)
        return session.data_size, session.reduce(mine).cpu()


def _gathered(kit: RankChecks, fewest: int, dtype: torch.dtype) -> tuple[int, Tensor]:
    with open_session(kit) as session:
        mine = _rows(session.data_rank, fewest, dtype).to(session.device)
        return session.data_size, session.gather(mine).cpu()


def _of_shape(kit: RankChecks, shape: tuple[int, ...]) -> tuple[int, Tensor, Tensor]:
    with open_session(kit) as session:
        mine = _laid_out(shape, session.data_rank).to(session.device)
        return session.data_size, session.gather(mine).cpu(), session.reduce(mine).cpu()


def _gathered_scalars(kit: RankChecks) -> tuple[int, Tensor]:
    with open_session(kit) as session:
        mine = torch.tensor(float(session.data_rank), device=session.device)
        return session.data_size, session.gather(mine).cpu()


def _gathered_objects(kit: RankChecks) -> list[dict[str, Any]]:
    with open_session(kit) as session:
        return session.gather_objects({"rank": session.rank, "text": "x" * session.rank})


def _broadcast(kit: RankChecks) -> list[dict[str, int]]:
    with open_session(kit) as session:
        mine = {"from": session.rank}
        return [session.broadcast(mine, src=source) for source in range(session.world_size)]


def _meet(kit: RankChecks, log: str) -> None:
    """Report before and after each barrier, to which another rank each time comes last, and late.

    How late is not for the clock to say: a second thread of each waiting rank reports its turns, and a
    machine that keeps the rank from going on keeps that thread from its turns as well.
    """
    with open_session(kit) as session:
        file = os.open(log, os.O_WRONLY | os.O_APPEND)
        try:
            for round_ in range(session.world_size):
                _meet_once(session, _Log(log, file, round_, session.rank))
        finally:
            os.close(file)


def _meet_once(session: Session, log: "_Log") -> None:
    if log.round_ == session.rank:
        log.wait_for(session.world_size - 1)
        log.write("before")
        session.barrier()
    else:
        with log.turns():
            log.write("before")
            session.barrier()
    log.write("after")


def _lines(path: Path | str) -> list[tuple[int, int, str]]:
    """Return round, rank and word of each line of a log."""
    whole = Path(path).read_text().rpartition("\n")[0]  # of the last line, there may be a part
    lines = [line.split() for line in whole.splitlines()]
    return [(int(round_), int(rank), word) for round_, rank, word in lines]


@dataclass(frozen=True, slots=True)
class _Log:
    """What one rank reports of one round, in a file of all ranks."""

    path: str
    file: int
    round_: int
    rank: int

    def write(self, word: str) -> None:
        os.write(self.file, f"{self.round_} {self.rank} {word}\n".encode())

    @contextmanager
    def turns(self) -> Iterator[None]:
        """Report the turns of a second thread."""
        done = threading.Event()

        def report() -> None:
            for _ in range(TURNS):
                if done.wait(0.01):
                    return
                self.write("turn")

        thread = threading.Thread(target=report, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def wait_for(self, others: int) -> None:
        """Wait until each of the others has gone on, or has had its turns without going on."""
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            mine = [(rank, word) for number, rank, word in _lines(self.path) if number == self.round_]
            came = {rank for rank, word in mine if word == "before"}
            if len([r for r in came if (r, "after") in mine or mine.count((r, "turn")) == TURNS]) == others:
                return
            time.sleep(0.005)


def _disagreed(kit: RankChecks) -> tuple[bool, str]:
    with open_session(kit) as session:
        session.check_agreement("the number", 3)
        try:
            session.check_agreement("the number", session.rank)
        except DisagreementError as error:
            return True, str(error)
        return session.world_size == 1, ""
