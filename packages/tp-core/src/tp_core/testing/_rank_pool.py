"""Ranks that live on from one check to the next."""

import faulthandler
import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import wait
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, cast

from tp_core.errors import RankFailedError
from tp_core.testing._ranks import RankOutcome, Report, dumps, start_ranks

if TYPE_CHECKING:
    from tp_core.testing._ranks import Pipe

__all__ = ["RankPool"]


class RankPool:
    """Ranks of real processes to which one check after another is sent.

    They are started at the first check, and join their process group, in ``setup``, once: a check
    costs what it does itself. That is for checks that may share a process and its groups; those that
    need ranks of their own take :func:`run_ranks`. A check that fails, hangs or kills a rank ends all
    ranks, and the next one gets new ones.

    Args:
        processes: How many ranks.
        setup: Called once on every rank, before its first check.
        args: Arguments for ``setup``.
        environ: Further variables for the ranks, besides those of torchrun.
        timeout_s: Every check has to end within so many seconds, and so has ``setup``.

    Example:
        >>> with RankPool(2) as ranks:  # doctest: +SKIP
        ...     assert ranks.run(os.getpid) == ranks.run(os.getpid)
    """

    def __init__(
        self,
        processes: int,
        *,
        setup: Callable[..., Any] | None = None,
        args: tuple[Any, ...] = (),
        environ: Mapping[str, str] | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        self.processes, self.timeout_s = processes, timeout_s
        self._setup, self._args, self._environ = setup, args, environ
        self._ranks: list[tuple[Any, Pipe]] = []

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call ``function(*args)`` on every rank and return what each returned, by rank.

        Functions of test modules and lambdas will do.

        Raises:
            RankFailedError: A rank raised, died or outlived the deadline; with its traceback.
        """
        payload = dumps((function, args))
        if not self._ranks:
            self._ranks = start_ranks(
                _serve, self.processes, self._environ, args=(list(sys.path), self.timeout_s), kwargs={}
            )
            if self._setup is not None:
                self._call(dumps((self._setup, self._args)))
        return self._call(payload)

    def close(self) -> None:
        """End the ranks; closing twice does nothing."""
        ranks, self._ranks = self._ranks, []
        for process, pipe in ranks:
            pipe.close()
            process.kill()  # it may hang in a collective, and has nothing to write
        for process, _ in ranks:
            process.join()
            process.close()

    def _call(self, payload: bytes) -> list[Any]:
        try:
            return self._exchange(payload)
        except BaseException:
            self.close()  # after a failure the ranks are out of step
            raise

    def _exchange(self, payload: bytes) -> list[Any]:
        deadline = time.monotonic() + self.timeout_s
        values: list[Any] = [None] * self.processes
        pending = {}
        for rank, (_, pipe) in enumerate(self._ranks):
            try:
                pipe.send_bytes(payload)
            except BrokenPipeError as error:
                raise RankFailedError(self._how_it_ended(rank)) from error
            pending[pipe] = rank
        while pending:
            ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                raise RankFailedError(str(RankOutcome(min(pending.values()))))
            for pipe in cast("list[Pipe]", ready):
                rank = pending.pop(pipe)
                try:
                    report: Report = pickle.loads(pipe.recv_bytes())
                except (EOFError, ConnectionResetError) as error:  # it died without a word
                    raise RankFailedError(self._how_it_ended(rank)) from error
                if report.error is not None:
                    raise RankFailedError(str(RankOutcome(rank, error=report.error)))
                values[rank] = report.value
        return values

    def _how_it_ended(self, rank: int) -> str:
        process, _ = self._ranks[rank]
        process.join(self.timeout_s)
        return str(RankOutcome(rank, exitcode=process.exitcode))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _serve(pipe: "Pipe", variables: dict[str, str], path: list[str], timeout_s: float) -> None:
    """Run on a rank what comes through the pipe, until it is closed."""
    os.environ.update(variables)
    sys.path[:] = path
    import torch

    torch.set_num_threads(1)
    faulthandler.enable()
    while True:
        try:
            payload = pipe.recv_bytes()
        except (EOFError, ConnectionResetError):
            # Straight out: a half-open process group must not hold the end up.
            os._exit(0)
        # A rank that hangs shows its stack just before it is ended.
        faulthandler.dump_traceback_later(max(0.5 * timeout_s, timeout_s - 2.0))
        try:
            function, args = pickle.loads(payload)
            data = dumps(Report(function(*args)))
        except BaseException:  # noqa: BLE001 - it is reported to the parent
            data = dumps(Report(error=traceback.format_exc()))
        faulthandler.cancel_dump_traceback_later()
        sys.stdout.flush()
        sys.stderr.flush()
        pipe.send_bytes(data)
