"""What happened in a run, in words and tables."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tp_trainer.loggers._reading import LoggedRun

__all__ = ["Story", "labels", "tell"]


@dataclass(frozen=True, slots=True)
class Story:
    """A run, as a page shows it.

    Attributes:
        label: What it is called.
        status: How it ended.
        summary: A few facts, by name.
        events: Rows of when, at which step, and what.
        tables: Names and values, by title.
        selection: Which backend was chosen, and why.
        note: What is wrong with the record; empty if nothing.
    """

    label: str
    status: str
    summary: dict[str, str]
    events: list[tuple[str, str, str]]
    tables: dict[str, dict[str, str]]
    selection: str
    note: str


def labels(runs: Sequence[LoggedRun]) -> list[str]:
    """Return what to call each run: its folder's name, with more of the path where two are alike."""
    folders = [run.path.absolute().parent for run in runs]
    names = [folder.name for folder in folders]
    return [
        name if names.count(name) == 1 else str(Path(*folder.parts[-3:]))
        for name, folder in zip(names, folders, strict=True)
    ]


def tell(label: str, run: LoggedRun) -> Story:
    """Return the story of a run."""
    info = run.info
    titles = ("hyperparameters", "environment", "versions")
    note = f"{run.unreadable} line(s) of {run.path.name} could not be read" if run.unreadable else ""
    return Story(
        label=label,
        status=run.status,
        summary=_summary(run),
        events=list(_events(run)),
        tables={title: _texts(info[title]) for title in titles if info.get(title)},
        selection=str(info.get("selection", "")),
        note=note,
    )


def _summary(run: LoggedRun) -> dict[str, str]:
    rows, starts = run.of_type("numbers"), run.of_type("run")
    found = {"status": run.status} if starts else {}
    if rows:
        found["steps"] = f"{max(int(row['step']) for row in rows):,}"
        found["epoch"] = str(rows[-1]["epoch"])
    if starts:
        found["started"] = _when(run.lines[0]["time"])
        found["time"] = _duration(_seconds_of_work(run))
    if len(starts) > 1:
        found["restarts"] = str(len(starts) - 1)
    for name in ("loss", "val_loss"):
        _, values = run.series(name)
        if values:
            found[f"last {name}"] = f"{values[-1]:.4g}"
            found[f"best {name}"] = f"{min(values):.4g}"
    return found


def _seconds_of_work(run: LoggedRun) -> float:
    """Return how long the parts of the run took together, without the time between them."""
    total, began, last = 0.0, None, 0.0
    for line in run.lines:
        if line["type"] == "run":
            total += 0.0 if began is None else last - began
            began = line["time"]
        last = line["time"]
    return total if began is None else total + last - began


def _events(run: LoggedRun) -> Iterator[tuple[str, str, str]]:
    for line in run.lines:
        when = _when(line["time"])
        if line["type"] == "run":
            step = line["step"]
            what = f"goes on from the checkpoint of step {step}" if line.get("resumed") else "begins"
            yield when, str(step), what
        elif line["type"] == "event":
            facts = ", ".join(f"{name} {value}" for name, value in line["facts"].items())
            yield when, str(line["step"]), f"{line['event']}{': ' if facts else ''}{facts}"
        elif line["type"] == "end":
            yield when, "", str(line["status"])


def _texts(values: Any) -> dict[str, str]:
    return {str(name): str(value) for name, value in values.items()} if isinstance(values, dict) else {}


def _when(time: float) -> str:
    return datetime.fromtimestamp(time, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return (
        f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"
    )
