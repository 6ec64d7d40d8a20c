"""What becomes of a chunk that did not come back whole: facts in, a decision out, and no state."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from tp_runner._options import Settings
from tp_runner._workers._failure import DIED, ITEM, RAISED, RESULT, TIMEOUT, Failure, describe_exit
from tp_runner._workers._fleet import Chunk, Died
from tp_runner._workers._pickling import why_not_picklable

__all__ = [
    "MOST_FAILED_STARTS",
    "Death",
    "Decision",
    "Finish",
    "Part",
    "Resend",
    "Split",
    "after_death",
    "after_failures",
    "after_pickling_error",
    "death_failure",
]

MOST_DEATHS = 3
"""An item that was being worked on in so many deaths is not tried again."""

MOST_FAILED_STARTS = 3
"""A worker that ended so often in a row before it was ready is not started again."""


class Part(NamedTuple):
    """A range of a chunk's items that is tried again, or has failed for good.

    Attributes:
        start: The place of its first item in the chunk.
        stop: The place after its last one.
        attempts: How many of the attempts that ``retries`` counts its items have had.
        deaths: How many workers its first item has killed.
        failure: Why it is not tried again; ``None`` when it is.
    """

    start: int
    stop: int
    attempts: int = 0
    deaths: int = 0
    failure: Failure | None = None


class Finish(NamedTuple):
    """The chunk is done; some of its results are failures."""

    results: list[Any]


class Split(NamedTuple):
    """Parts of the chunk are handled on their own; ``results`` has those of the other items."""

    parts: list[Part]
    results: list[Any] | None = None


class Resend(NamedTuple):
    """The chunk goes out again as it is."""


Decision = Finish | Split | Resend


class Death(NamedTuple):
    """The end of a worker, as the policy sees it.

    Attributes:
        event: What the fleet reported.
        current: The number of the chunk to blame and the place in it; ``None`` for none.
        is_timeout: Whether the worker was killed because an item took too long.
        is_revived: Whether it was started again.
        any_alive: Whether a worker is left, this one included.
        held: The places in the input of all items of this run that it held.
    """

    event: Died
    current: tuple[int, int] | None
    is_timeout: bool
    is_revived: bool
    any_alive: bool
    held: tuple[int, ...]


def after_failures(chunk: Chunk, results: list[Any], settings: Settings) -> Decision:
    """Decide about a chunk that came back with failures among its results."""
    first = results[0]
    if (
        len(results) > 1
        and isinstance(first, Failure)
        and first.kind in {ITEM, RESULT}
        and all(result is first for result in results)
    ):
        # They could not be unpickled together; one by one the culprit shows.
        return Split(_singles(range(len(results)), chunk.attempts))
    if chunk.attempts < settings.max_retries:
        again = [i for i, r in enumerate(results) if isinstance(r, Failure) and r.kind == RAISED]
        if again:
            return Split(_singles(again, chunk.attempts + 1), results)
    return Finish(results)


def after_pickling_error(chunk: Chunk, error: BaseException) -> Decision:
    """Decide about a chunk that could not be sent."""
    if len(chunk.items) > 1:
        return Split(_singles(range(len(chunk.items)), chunk.attempts))
    failure = Failure.of(error, ITEM)
    failure.traceback = ""
    failure.summary = why_not_picklable(chunk.items[0], "item", error)
    return Finish([failure])


def after_death(chunk: Chunk, death: Death, settings: Settings) -> Decision:
    """Decide about a chunk that a dead worker had been given."""
    n_items, worker = len(chunk.items), death.event.worker
    if not death.any_alive:
        return Finish([death_failure(death)] * n_items)
    if death.current is None or chunk.seq != death.current[0]:
        return Resend()
    place, batch = death.current[1], settings.batching.size if settings.batching else 1
    start = place - place % batch
    stop = min(start + batch, n_items)
    deaths = (chunk.deaths if not start else 0) + 1
    if death.is_timeout or not death.is_revived:
        is_tried_again = chunk.attempts < settings.max_retries
    else:
        is_tried_again = deaths < MOST_DEATHS
    failure = None
    if not is_tried_again:
        if death.is_timeout:
            failure = Failure(TIMEOUT, f"took longer than timeout_s={settings.timeout_s}")
            failure.worker = worker
        else:
            failure = death_failure(death)
            if death.is_revived:
                failure.summary += f"; {deaths} workers died with this item"
    attempts = chunk.attempts + death.is_timeout
    parts = [
        Part(0, start, attempts if is_tried_again else chunk.attempts),
        Part(start, stop, attempts, deaths if is_tried_again else 0, failure),
        Part(stop, n_items, attempts if is_tried_again else chunk.attempts),
    ]
    return Split([part for part in parts if part.start < part.stop])


def death_failure(death: Death) -> Failure:
    """Describe a worker's death in place of a result."""
    event = death.event
    summary = describe_exit(event.exitcode, is_out_of_memory=event.is_out_of_memory)
    if not event.was_ready:
        summary = f"before it was ready: {summary}"
    failure = Failure(DIED, summary, exitcode=event.exitcode)
    failure.worker = event.worker
    failure.held = death.held
    return failure


def _singles(places: Sequence[int], attempts: int) -> list[Part]:
    return [Part(i, i + 1, attempts) for i in places]
