"""Ranks that are threads of one process and take turns: a split model on several ranks without any launcher.

One rank runs until it reaches a collective, then the next one does; the last to arrive carries the collective
out for all. So there are no races, random numbers are each rank's own, and what would hang between processes
(a rank that does something else, or has ended) is an error at once.
"""

import random
import sys
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from tp_core.errors import DisagreementError

from tp_shard._groups import _group
from tp_shard._groups._group import ALONE, Group

__all__ = ["SimulatedError", "simulate"]

T = TypeVar("T")


class SimulatedError(Exception):
    """A rank raised; its error is the cause.

    Attributes:
        rank: Which one.
        error: What it raised.
    """

    def __init__(self, rank: int, error: BaseException) -> None:
        super().__init__(f"rank {rank} raised {type(error).__name__}: {error}")
        self.rank, self.error = rank, error


class _StoppedError(BaseException):
    """Another rank has raised, so this one ends, past whatever its code catches."""


def simulate(ranks: int, function: Callable[[Group], T]) -> list[T]:
    """Call ``function(group)`` on each of ``ranks`` simulated ranks; return what each returned.

    Meanwhile the group is the current one of each rank. Random numbers are left as they were, and are the
    same on each rank.

    Raises:
        SimulatedError: A rank raised, or the ranks did different things; the others are ended.

    Collectives: none, beyond the simulated ones.
    """
    return _Simulation(ranks).run(function)


class _Simulation:
    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._changed = threading.Condition()
        self._turn = 0
        self._slots: list[tuple[str, Any] | None] = [None] * ranks
        self._done = [False] * ranks
        self._failed: SimulatedError | None = None

    def run(self, function: Callable[[Group], T]) -> list[T]:
        results: list[Any] = [None] * self.ranks
        outside = _Settings()

        def body(rank: int) -> None:
            try:
                self._wait(rank)
                outside.restore()
                group = Group(
                    rank, self.ranks, _SimulatedGroup(self, rank, self.ranks) if self.ranks > 1 else None
                )
                _group.set_groups(group, ALONE)
                with torch.autograd.set_multithreading_enabled(False):
                    results[rank] = function(group)
            except _StoppedError:
                pass
            except BaseException as error:  # noqa: BLE001 - it is raised where the simulation was asked for
                if self._failed is None:
                    self._failed = SimulatedError(rank, error)
            self._done[rank] = True
            self._pass_on(rank)

        threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(self.ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        outside.restore()
        if self._failed is not None:
            raise self._failed from self._failed.error
        return results

    def meet(self, rank: int, what: str, brought: Any, carry_out: Callable[[list[Any]], None]) -> None:
        """Wait for the others to do the same; the last one does it for all."""
        self._slots[rank] = what, brought
        if all(slot is not None for slot in self._slots):
            found = [slot for slot in self._slots if slot is not None]
            other = next((r for r, slot in enumerate(found) if slot[0] != found[0][0]), None)
            if other is not None:
                msg = f"rank 0 calls {found[0][0]}, and rank {other} {found[other][0]}"
                raise DisagreementError(msg)
            with torch.no_grad():
                carry_out([brought for _, brought in found])
            self._slots = [None] * self.ranks
            return
        if any(self._done):
            msg = f"rank {rank} calls {what}, and rank {self._done.index(True)} has ended without it"
            raise DisagreementError(msg)
        mine = _Settings()
        self._pass_on(rank)
        self._wait(rank)
        mine.restore()

    def _wait(self, rank: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._turn == rank)
        if self._failed is not None:
            raise _StoppedError

    def _pass_on(self, rank: int) -> None:
        """Give the turn to the next rank that does not wait for others."""
        following = [(rank + i) % self.ranks for i in range(1, self.ranks + 1)]
        free = [r for r in following if not self._done[r] and (self._slots[r] is None or self._failed)]
        if not free and not all(self._done) and self._failed is None:
            waiting = next(r for r in following if not self._done[r])
            what = self._slots[waiting][0]  # type: ignore[index]  # it waits in it
            error = DisagreementError(f"rank {waiting} calls {what}, and rank {rank} has ended without it")
            self._failed = SimulatedError(waiting, error)
            free = [waiting]
        with self._changed:
            self._turn = free[0] if free else -1
            self._changed.notify_all()


class _Settings:
    """What a process has once and each rank has to have for itself: random numbers, current groups."""

    def __init__(self) -> None:
        self._random = torch.get_rng_state(), random.getstate()
        numpy = sys.modules.get("numpy")  # imported by the model, if it draws from it
        self._numpy = None if numpy is None else numpy.random.get_state()
        self._groups = _group._current.tensor, _group._current.data

    def restore(self) -> None:
        torch.set_rng_state(self._random[0])
        random.setstate(self._random[1])
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)
        _group.set_groups(*self._groups)


class _Done(dist.Work):
    """A collective that has ended already."""

    def wait(self, timeout: Any = None) -> bool:  # noqa: ARG002 - torch's signature
        return True

    def is_completed(self) -> bool:
        return True


class _SimulatedGroup(dist.ProcessGroup):
    """The collectives of one simulated rank, under the names by which torch calls them.

    Torch lets groups be written in Python, and calls some of their methods by names that differ between
    its versions: both are here, and the tests of simulated ranks would notice a third.
    """

    is_simulated = True

    def __init__(self, simulation: _Simulation, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # torch's stub lacks this constructor
        self._simulation, self._rank, self._size = simulation, rank, size

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return "simulated"

    def _meet(
        self, what: str, tensor: torch.Tensor, brought: Any, carry_out: Callable[[list[Any]], None]
    ) -> Any:
        described = f"{what} of a {tensor.dtype} tensor of shape {tuple(tensor.shape)}"
        self._simulation.meet(self._rank, described, brought, carry_out)
        return _Done()

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:  # type: ignore[override]  # the one form that is called
        biggest = opts is not None and opts.reduceOp == dist.ReduceOp.MAX

        def carry_out(everyones: list[torch.Tensor]) -> None:
            stacked = torch.stack(everyones)
            result = stacked.amax(0) if biggest else stacked.sum(0)
            for tensor in everyones:
                tensor.copy_(result)

        return self._meet("all_reduce", tensors[0], tensors[0], carry_out)

    def all_gather_single(self, output: torch.Tensor, mine: torch.Tensor, opts: Any = None) -> Any:  # noqa: ARG002 - torch's signature, as below
        def carry_out(everyones: list[Any]) -> None:
            joined = torch.cat([sent.reshape(-1) for _, sent in everyones])
            for place, _ in everyones:
                place.copy_(joined.view_as(place))

        return self._meet("all_gather", mine, (output, mine), carry_out)

    def reduce_scatter_single(self, output: torch.Tensor, mine: torch.Tensor, opts: Any = None) -> Any:  # noqa: ARG002
        def carry_out(everyones: list[Any]) -> None:
            total = torch.stack([sent.reshape(-1) for _, sent in everyones]).sum(0)
            for (place, _), part in zip(everyones, total.chunk(self._size), strict=True):
                place.copy_(part.view_as(place))

        return self._meet("reduce_scatter", mine, (output, mine), carry_out)

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:  # type: ignore[override]  # as above
        source = 0 if opts is None else opts.rootRank

        def carry_out(everyones: list[torch.Tensor]) -> None:
            for tensor in everyones:
                tensor.copy_(everyones[source])

        return self._meet("broadcast", tensors[0], tensors[0], carry_out)

    _allgather_base = all_gather_single  # type: ignore[assignment]  # as above
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]  # as above
