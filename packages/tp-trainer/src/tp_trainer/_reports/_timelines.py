"""The timeline of a trace: what each rank computed when, from a file of Chrome's format."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tp_core.errors import StateError


class TimeSpan(NamedTuple):
    """One piece of work.

    Attributes:
        row: The place of its row.
        begin: When it began, in seconds.
        duration: How long it took, in seconds.
        kind: The name without its number.
        number: The number at the end of the name.
        category: What it belongs to within its row, as its stage.
    """

    row: int
    begin: float
    duration: float
    kind: str
    number: str
    category: str

    @property
    def end(self) -> float:
        """When it ended, in seconds."""
        return self.begin + self.duration


@dataclass(frozen=True, slots=True)
class Timeline:
    """What each rank computed when."""

    name: str
    rows: list[str]
    spans: list[TimeSpan]

    @property
    def title(self) -> str:
        """The name, and the share of the time in which rows are empty."""
        if not self.spans:
            return self.name
        first = min(span.begin for span in self.spans)
        whole = max(span.end for span in self.spans) - first
        if not whole:
            return f"{self.name}: idle 0%"
        busy = 0.0
        reached = [first] * len(self.rows)
        # Spans may lie within others: only what goes beyond the row's end so far counts.
        for span in sorted(self.spans):
            busy += max(0.0, span.end - max(span.begin, reached[span.row]))
            reached[span.row] = max(reached[span.row], span.end)
        return f"{self.name}: idle {1 - busy / whole / len(self.rows):.0%}"


def read_timeline(path: Path) -> Timeline:
    """Return the timeline of a trace.

    Raises:
        StateError: It is not of Chrome's format.
    """
    try:
        events = json.loads(path.read_text("utf-8"))["traceEvents"]
        work = [event for event in events if event["ph"] == "X"]
        names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
        threads = sorted({event["tid"] for event in work})
        spans = []
        for event in work:
            kind = event["name"].rstrip("0123456789 ")
            number = event["name"][len(kind) :].strip()
            row = threads.index(event["tid"])
            begin, duration = event["ts"] / 1e6, event["dur"] / 1e6
            spans.append(TimeSpan(row, begin, duration, kind, number, str(event.get("cat", ""))))
    except (ValueError, KeyError, TypeError) as error:
        msg = f"{path} is not a trace of Chrome's format: {error!r}; move it out of the run's folder"
        raise StateError(msg) from error
    rows = [str(names.get(thread, thread)) for thread in threads]
    return Timeline(path.name.removesuffix(".trace.json"), rows, spans)
