"""Sends and receives between the ranks of stages, and what they learn of each other when one fails."""

from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import (  # type: ignore[attr-defined]  # torch does not export them all
    PrefixStore,
    ProcessGroup,
    Store,
)
from tp_core.errors import RankFailedError

from tp_pipeline._schedule import Orders, StageWork
from tp_pipeline._stage_dry_run import TensorSpec

_CHAIN_S = 5.0  # how long a rank that has waited in vain waits for what the next one waits for
_MATES_S = 2.0  # how long a rank that has failed waits for the same of those that compute with it


class PendingTensors(NamedTuple):
    """Tensors that are on their way to this rank.

    Attributes:
        requests: What to wait for.
        tensors: The tensors.
    """

    requests: list[Any]
    tensors: list[Tensor]


class StageExchange:
    """Sends tensors to other ranks of a group, and receives them.

    Args:
        group: The group.
        orders: Which rank has a stage.
        device: The device.
        timeout_s: The seconds that a rank waits for another one.
        store: A store of all ranks.
        mates: A name of the ranks that compute together with this one in its stages, and their number.

    Attributes:
        device: The device.
        me: This rank in the group.
        rank_of: Returns the rank of a stage.
        is_broken: Whether another rank has not sent or received what it should have.
    """

    def __init__(
        self,
        group: ProcessGroup,
        orders: Orders,
        device: torch.device,
        timeout_s: float,
        store: Store,
        mates: tuple[str, int],
    ) -> None:
        self.device = device
        self.me = dist.get_rank(group)
        self.rank_of = orders.rank_of
        self.is_broken = False
        self._group, self._global_me = group, dist.get_rank()
        self._stages = orders.stages
        self._timeout_s = timeout_s
        self._sent: list[tuple[Any, Tensor]] = []  # requests, with tensors that must live until then

        # What ranks write when they wait in vain or fail, by the number of the batch.
        name, self._mates = mates
        self._store = PrefixStore(f"tp/pipeline/{group.group_name}", store)
        self._failures = PrefixStore(f"tp/pipeline/failures/{name}", store)
        self._batches = 0

    def send(self, work: StageWork, tensors: Sequence[Tensor], to: int) -> None:
        """Begin to send tensors to the rank of a stage. One message for each tensor."""
        for number, tensor in enumerate(tensors):
            raw = _bytes_of(tensor.detach().contiguous())
            if raw.numel():
                tag = self._tag(work, number)
                # Without waiting: it may come to its receive only after this rank's next work.
                request = dist.isend(raw, group=self._group, group_dst=self.rank_of(to), tag=tag)
                self._sent.append((request, raw))

    def receive(self, work: StageWork, specs: Sequence[TensorSpec], source: int) -> PendingTensors:
        """Begin to receive tensors from the rank of a stage."""
        pending = PendingTensors([], [])
        for number, spec in enumerate(specs):
            tensor = torch.empty(spec.shape, dtype=spec.dtype, device=self.device)
            pending.tensors.append(tensor)
            if tensor.numel():
                raw, tag = _bytes_of(tensor), self._tag(work, number)
                request = dist.irecv(raw, group=self._group, group_src=self.rank_of(source), tag=tag)
                pending.requests.append(request)
        return pending

    def wait(self, requests: Sequence[Any], what: str, work: StageWork, stage: int) -> None:
        """Wait for tensors that come from the rank of a stage.

        Raises:
            RankFailedError: They have not come in time, or the rank has gone.
        """
        try:
            for request in requests:
                self._finish(request)
        except RuntimeError as error:
            self.is_broken = True
            if "imed out" in str(error):
                silent = self._silent(stage)
                how = f"for {self._timeout_s:g} s (the option timeout_s)"
                where = f"stage {silent}, on rank {self._global(silent)}, hangs: nothing has come from it"
            else:
                how, where = "in vain", self._end_of(self._global(stage))
            msg = (
                f"stage {work.stage} has waited {how} for the {what} of micro-batch {work.part} from stage "
                f"{stage}; {where}"
            )
            raise RankFailedError(msg) from error

    def _global(self, stage: int) -> int:
        return dist.get_global_rank(self._group, self.rank_of(stage))

    def _silent(self, stage: int) -> int:
        """Return the stage that all wait for, by what ranks that wait write into the store."""
        self._store.set(str(self._global_me), str(stage))
        seen: set[int] = set()
        while stage not in seen:
            seen.add(stage)
            key = str(self._global(stage))
            try:
                # Those that wait, too, began a little later.
                self._store.wait([key], timedelta(seconds=min(self._timeout_s, _CHAIN_S)))
                stage = int(self._store.get(key))
            except RuntimeError:  # it says nothing, or the store has gone with its rank
                break
        return stage

    def _end_of(self, rank: int) -> str:
        """Return how a rank of this group has ended, by what it wrote into the store if it had an error."""
        with suppress(RuntimeError):  # the store has gone with its rank
            if self._store.check([f"failed/{rank}"]):
                return self._store.get(f"failed/{rank}").decode()
        return f"rank {rank} has ended"

    def fail(self, error: Exception) -> Exception:
        """Return the error with which this rank comes to the end of the batch.

        Ranks that compute together with this one wait for it within layers, where it has no zeros for them.
        Unless all of them have failed, it ends here: so they learn of it, and their launcher does.

        Raises:
            Exception: The error, if another one of them has not failed, or a neighbor has gone.
        """
        ends = self.is_broken or self._mates > 1
        if self._mates > 1:
            batch = str(self._batches)
            try:
                error = self._note_failure(error, batch)
                if not self.is_broken:
                    self._failures.wait([f"{batch}/all"], timedelta(seconds=_MATES_S))
                    ends = False
            except RuntimeError:  # not in time, or the store has gone with its rank
                pass
        if ends:
            text = f"rank {self._global_me} has failed in its stages: {type(error).__name__}: {error}"
            if isinstance(error, RankFailedError):  # it names the rank
                text = str(error)
            with suppress(RuntimeError):  # the store has gone with its rank
                self._store.set(f"failed/{self._global_me}", text)
            raise error
        return error

    def _note_failure(self, error: Exception, batch: str) -> Exception:
        """Write an error into the store; return the first one of them if this rank's may follow from it."""
        number = self._failures.add(f"{batch}/number", 1)
        text = f"has failed in its stages: {type(error).__name__}: {error}"
        if number == 1:
            self._failures.set(f"{batch}/first", f"rank {self._global_me} {text}")
        else:
            first = self._failures.get(f"{batch}/first").decode()
            if not first.endswith(text):  # such as a connection that the first one has left
                error = RankFailedError(first)
        if number == self._mates:
            self._failures.set(f"{batch}/all", "")
        return error

    def finish(self) -> None:
        """Wait until all has been sent.

        Raises:
            RankFailedError: Another rank has not received it.
        """
        try:
            for request, _ in self._sent:
                self._finish(request)
        except RuntimeError as error:
            msg = f"the rank of a neighboring stage has ended, or hangs, before it received all: {error}"
            raise RankFailedError(msg) from error
        finally:
            self._sent.clear()
            self._batches += 1

    def _finish(self, request: Any) -> None:
        if self.device.type == "cpu":
            request.wait(timedelta(seconds=self._timeout_s))
        else:
            # The stream waits and the host goes on to queue work: with a limit torch's groups of accelerators
            # would block the host until the tensor is there. Their own limit is the group's.
            request.wait()

    def _tag(self, work: StageWork, number: int) -> int:
        is_back = work.kind.endswith("B")
        sender = work.stage
        if work.kind.startswith("RECV"):
            sender += 1 if is_back else -1
        return ((work.part * self._stages + sender) * 2 + is_back) * 256 + number


def _bytes_of(tensor: Tensor) -> Tensor:
    # Not every group sends every type (gloo sends no bool).
    return tensor.view(-1).view(torch.uint8)
