"""One pass over an input: makes chunks of its items and puts their results in order."""

import collections
import time
from dataclasses import replace
from typing import Any

from tp_core.errors import TpError

from tp_runner._options import Settings
from tp_runner._scheduling._assignments import Assignments
from tp_runner._scheduling._chunking import Bounds
from tp_runner._scheduling._retries import (
    Death,
    Decision,
    Finish,
    Line,
    Part,
    Split,
    after_death,
    after_failures,
    after_pickling_error,
    death_failure,
    outcome_of,
)
from tp_runner._scheduling._source import Source
from tp_runner._workers._failure import Failure, failure_to_error
from tp_runner._workers._fleet import Chunk, Died, Done, Fleet

__all__ = ["Run"]


class Run:
    """The state of one pass. It waits for nothing and locks nothing: the pool does.

    Args:
        source: The input.
        fleet: The workers.
        assignments: What they have been given.
        settings: How the runner is run.
        number: This run's number.
        ordered: Whether results come in the order of the items.
        numbered: Whether to give each result as the place of its item, the result and its error.
        on_error: ``"raise"`` a failure or ``"return"`` it in the item's place.

    Attributes:
        again: What is to be handed out again.
    """

    def __init__(
        self,
        source: Source,
        fleet: Fleet,
        assignments: Assignments,
        settings: Settings,
        *,
        number: int,
        ordered: bool,
        numbered: bool,
        on_error: str,
    ) -> None:
        self.source = source
        self.number = number
        self.is_stopping = False
        self._ended_by: TpError | None = None
        self._fatal: BaseException | None = None
        self._fleet = fleet
        self._assignments = assignments
        self._settings = settings
        self._ordered = ordered
        self._numbered = numbered
        self._on_error = on_error
        self.again = Line(time.monotonic)
        self._queue: collections.deque[Chunk] = collections.deque()  # ordered: all; else finished
        self._next_index = 0
        self._bounds = Bounds(settings, fleet)
        self.chunking = self._bounds.chunking

    # -- the consumer's side -------------------------------------------------------------------

    def check(self) -> None:
        """Raise why this run was ended from outside, if it was."""
        if self._ended_by is not None:
            raise self._ended_by

    def is_over(self) -> bool:
        """Whether everything was given; raises what ended the run otherwise.

        Raises:
            Exception: What the input raised, or why no worker is left.
        """
        if self._fatal is not None and (not self._bounds.n_chunks or not self._ordered):
            raise self._fatal
        if self._bounds.n_chunks:
            return False
        if self.source.exhausted and self.source.error is not None:
            raise self.source.error
        return self.source.exhausted

    def has_finished(self) -> bool:
        """Whether a chunk may be given."""
        if not self._queue:
            return False
        return not self._ordered or bool(self._queue[0].results and not self._queue[0].missing)

    def awaits_results(self) -> bool:
        """Whether something is on its way, or may still come from the input."""
        return bool(self._bounds.n_chunks or not self.source.exhausted)

    def next_finished(self) -> Chunk | None:
        """Return the next chunk to give, if it has finished."""
        queue = self._queue
        if not queue:
            return None
        if self._ordered:
            if not queue[0].results or queue[0].missing:
                if self._fatal is not None and not self._assignments.holders(self.number):
                    raise self._fatal
                return None
        elif queue[0].failed and self._on_error == "raise":
            # Others that have finished go first.
            good = next((c for c in queue if not c.failed), None)
            if good is not None:
                queue.remove(good)
                return self._bounds.out(good)
        return self._bounds.out(queue.popleft())

    def outcome(self, chunk: Chunk) -> tuple[list[Any], BaseException | None]:
        """Return what to give for a finished chunk, and what to raise after it."""
        raises = self._on_error == "raise"
        return outcome_of(chunk, self._fleet.devices, raises=raises, numbered=self._numbered)

    def end(self, reason: TpError | None = None) -> None:
        """Stop; what the workers still do is thrown away when it comes."""
        if reason is not None and self._ended_by is None:
            self._ended_by = reason
        self.is_stopping = True
        self._queue.clear()
        self.again.clear()
        self.source.close()

    # -- the workers' side ---------------------------------------------------------------------

    def credits(self) -> int:
        """Return how many of its chunks one worker may have been given at a time."""
        return self._bounds.credits(self.source.remaining)

    def next_chunk(self, most: int | None = None) -> Chunk | None:
        """Return what goes to a worker next, if this run's bounds allow it.

        Args:
            most: How many items it should have at most, if they have not been sent before.
        """
        return self.again.take() or self._new_chunk(most)

    def _new_chunk(self, most: int | None) -> Chunk | None:
        if self.source.exhausted:
            return None
        n_items = self._bounds.room(self.source.remaining, most)
        items = self.source.take(n_items, whole=self._bounds.whole) if n_items else []
        if not items:
            return None
        chunk = Chunk(self._assignments.next_seq(), self._next_index, items, self.number)
        chunk.is_long = self.chunking.is_long()
        self._next_index += len(items)
        self._bounds.into(chunk)
        if self._ordered:
            self._queue.append(chunk)
        return chunk

    def on_sent(self, chunk: Chunk, nbytes_before: int) -> None:
        """Note that a chunk has left, now that its size is known."""
        if chunk.parent is None:
            self._bounds.nbytes += chunk.nbytes - nbytes_before

    def on_done(self, chunk: Chunk, done: Done) -> None:
        """Note that a chunk has come back."""
        if chunk.parent is None:
            self._bounds.nbytes += done.nbytes - chunk.nbytes
        self.chunking.learn(len(chunk.items), done.timing.worked_s, max(done.nbytes, chunk.nbytes))
        if chunk.parent is None:
            chunk.nbytes = done.nbytes
        if not done.failed:
            self._finish(chunk, done.results, failed=False)
            return
        for result in done.results:
            if isinstance(result, Failure):
                result.worker = done.worker
        self._apply(chunk, after_failures(chunk, done.results, self._settings))

    def on_pickling_error(self, chunk: Chunk, error: BaseException) -> None:
        """Note that a chunk could not be sent."""
        self._apply(chunk, after_pickling_error(chunk, error))

    def on_worker_death(self, chunks: list[Chunk], death: Death) -> None:
        """Note that a worker has died with some chunks of this run."""
        held = tuple(chunk.start + i for chunk in chunks for i in range(len(chunk.items)))
        current = death.current
        if current is None and chunks and not death.is_revived and self._on_error == "raise":
            current = chunks[0].seq, 0
        death = death._replace(current=current, held=held)
        for chunk in chunks:
            self._apply(chunk, after_death(chunk, death, self._settings))
        if not death.any_alive:
            failure = death_failure(death)
            failure.summary += "; no worker is left"
            self._fail(failure, index=held[0] if held else None)

    def on_failed_start(self, chunks: list[Chunk], died: Died, failure: Failure) -> None:
        """Note that a worker could not be started again: the run cannot go on as it was meant to."""
        failure.worker = died.worker
        for chunk in chunks:
            self._apply(chunk, Finish([failure] * len(chunk.items)))
        self._fail(failure, index=None)

    def _fail(self, failure: Failure, *, index: int | None) -> None:
        self.is_stopping = True
        if self._fatal is None:
            device = self._fleet.devices[failure.worker]
            self._fatal = failure_to_error(failure, index=index, device=device, worker=failure.worker)

    # -- decisions -----------------------------------------------------------------------------

    def _apply(self, chunk: Chunk, decision: Decision) -> None:
        if isinstance(decision, Finish):
            self._finish(chunk, decision.results, failed=True)
        elif isinstance(decision, Split):
            self._split(chunk, decision)
        else:
            self.again.append(chunk)

    def _split(self, chunk: Chunk, split: Split) -> None:
        """Put parts of a chunk in line again; parts of parts belong to the whole chunk."""
        if not self._ordered:
            self._scatter(chunk, split)
            return
        whole, base = (chunk, 0) if chunk.parent is None else (chunk.parent, chunk.offset)
        if chunk.parent is None:
            whole.results = split.results or [None] * len(chunk.items)
        else:
            whole.missing -= 1
            if split.results is not None:
                whole.results[base : base + len(split.results)] = split.results
        whole.missing += len(split.parts)
        again = {i for part in split.parts for i in range(part.start, part.stop)}
        whole.failed |= any(
            isinstance(result, Failure) and i not in again for i, result in enumerate(split.results or ())
        )
        for part in split.parts:
            self._go_on(replace(self._piece(chunk, part), parent=whole, offset=base + part.start), part)

    def _scatter(self, chunk: Chunk, split: Split) -> None:
        """Make chunks of their own of all parts: where there is no order, none waits for another one."""
        self._bounds.out(chunk)
        at = 0
        for part in (*split.parts, Part(len(chunk.items), len(chunk.items))):
            if at < part.start and split.results is not None:
                results = split.results[at : part.start]
                done = self._piece(chunk, Part(at, part.start))
                done.nbytes = chunk.nbytes * len(results) // len(chunk.items)
                self._bounds.into(done)
                self._finish(done, results, failed=any(isinstance(result, Failure) for result in results))
            if part.start < part.stop:
                piece = self._piece(chunk, part)
                self._bounds.into(piece)
                self._go_on(piece, part)
            at = part.stop

    def _piece(self, chunk: Chunk, part: Part) -> Chunk:
        seq, items = self._assignments.next_seq(), chunk.items[part.start : part.stop]
        piece = Chunk(seq, chunk.start + part.start, items, chunk.run, sent=chunk.sent)
        piece.attempts, piece.deaths = part.attempts, part.deaths
        return piece

    def _go_on(self, piece: Chunk, part: Part) -> None:
        if part.failure is None:
            self.again.append(piece, part.delay_s)
        else:
            self._finish(piece, [part.failure] * len(piece.items), failed=True)

    def _finish(self, chunk: Chunk, results: list[Any], *, failed: bool) -> None:
        """Note the results of a chunk, or of a part of one."""
        whole = chunk.parent or chunk
        whole.failed |= failed
        if whole is chunk:
            chunk.results = results
        else:
            whole.results[chunk.offset : chunk.offset + len(results)] = results
            whole.missing -= 1
            if whole.missing:
                return
        if not self._ordered:
            self._queue.append(whole)
        if whole.failed and self._on_error == "raise":
            # Nothing beyond a failure is asked for; what is before it still is.
            self.source.close()
            self.source.exhausted = True
            if not self._ordered:
                self.is_stopping = True
