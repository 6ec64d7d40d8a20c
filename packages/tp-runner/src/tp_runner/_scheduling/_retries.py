"""The retry policy for failed chunks: a pure function of facts."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from tp_runner._options import Settings
from tp_runner._workers._failure import ITEM, RAISED, RESULT, TIMEOUT, Failure
from tp_runner._workers._fleet import Chunk, Died, failure_of_death
from tp_runner._workers._pickling import explain_not_picklable

MOST_DEATHS = 3
"""After so many deaths of workers at work on it, an item is not tried again."""

MOST_DELAYS = 16
"""The longest rest of an item, in multiples of ``retry_delay_s``."""

MOST_FAILED_STARTS = 3
"""After so many ends in a row before it was ready, a worker is not started again."""


class Part(NamedTuple):
    """A range of a chunk's items that is tried again, or has failed for good."""

    start: int  # the place of its first item in the chunk
    stop: int  # the place after its last one
    attempts: int = 0  # how many of the attempts that ``retries`` counts its items have had
    deaths: int = 0  # how many workers its first item has killed
    failure: Failure | None = None  # why it is not tried again; ``None`` when it is
    delay_s: float = 0.0  # after how many seconds it is


class Finish(NamedTuple):
    """Decision: the chunk is done; some of its results are failures."""

    results: list[Any]


class Split(NamedTuple):
    """Decision: parts of the chunk are handled alone; ``results`` has the results of the other items."""

    parts: list[Part]
    results: list[Any] | None = None


class Resend(NamedTuple):
    """Decision: the chunk is sent again, unchanged."""


Decision = Finish | Split | Resend


class Death(NamedTuple):
    """The facts of a worker's end."""

    event: Died
    current: tuple[int, int] | None  # the number of the chunk to blame and the place in it; ``None`` for none
    is_timeout: bool  # whether the worker was killed because an item took too long
    is_revived: bool  # whether it was started again
    any_alive: bool  # whether a worker is left, this one included
    held: tuple[int, ...]  # the places in the input of all items of this run that it held


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
            return Split(_singles(again, chunk.attempts + 1, _delay_s(chunk, settings)), results)
    return Finish(results)


def after_pickling_error(chunk: Chunk, error: BaseException) -> Decision:
    """Decide about a chunk that could not be sent."""
    if len(chunk.items) > 1:
        return Split(_singles(range(len(chunk.items)), chunk.attempts))
    failure = Failure.of(error, ITEM)
    failure.traceback = ""
    failure.summary = explain_not_picklable(chunk.items[0], "item", error)
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
        Part(
            start,
            stop,
            attempts,
            deaths if is_tried_again else 0,
            failure,
            _delay_s(chunk, settings) if death.is_timeout else 0.0,
        ),
        Part(stop, n_items, attempts if is_tried_again else chunk.attempts),
    ]
    return Split([part for part in parts if part.start < part.stop])


def death_failure(death: Death) -> Failure:
    """Describe a worker's death in place of a result."""
    failure = failure_of_death(death.event)
    failure.held = death.held
    return failure


def _singles(places: Sequence[int], attempts: int, delay_s: float = 0.0) -> list[Part]:
    return [Part(i, i + 1, attempts, delay_s=delay_s) for i in places]


def _delay_s(chunk: Chunk, settings: Settings) -> float:
    """Return how long an item rests before its next attempt."""
    return settings.retry_delay_s * min(2.0**chunk.attempts, MOST_DELAYS)
