"""The story of a run, in words and tables."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tp_trainer.loggers import LoggedRun

_TITLES = ("hyperparameters", "environment", "versions")


@dataclass(frozen=True, slots=True)
class Story:
    """The contents of a run's part of the page."""

    label: str
    status: str
    summary: dict[str, str]
    events: list[tuple[str, str, str]]
    tables: dict[str, dict[str, str]]
    selection: str
    note: str


def labels(runs: Sequence[LoggedRun]) -> list[str]:
    """Return a label for each run: its folder's name, or more of the path if two names are equal."""
    folders = [run.path.absolute().parent for run in runs]
    names = [folder.name for folder in folders]
    return [
        name if names.count(name) == 1 else str(Path(*folder.parts[-3:]))
        for name, folder in zip(names, folders, strict=True)
    ]


def story_of(label: str, run: LoggedRun) -> Story:
    """Return what the page says of a run."""
    note = ""
    if run.unreadable:
        note = f"{run.unreadable} line(s) of {run.path.name} could not be read"
    return Story(
        label=label,
        status=run.status,
        summary=_summary(run),
        events=list(_events(run)),
        tables={title: _texts(run.info[title]) for title in _TITLES if run.info.get(title)},
        selection=str(run.info.get("selection", "")),
        note=note,
    )


def _summary(run: LoggedRun) -> dict[str, str]:
    rows, starts = run.of_type("numbers"), run.of_type("run")
    summary: dict[str, str] = {}
    if starts:
        summary["status"] = run.status
    if rows:
        summary["steps"] = f"{max(int(row['step']) for row in rows):,}"
        summary["epoch"] = str(rows[-1]["epoch"])
    if starts:
        summary["started"] = _when(run.lines[0]["time"])
        summary["time"] = _duration(_seconds_of_work(run))
    if len(starts) > 1:
        summary["restarts"] = str(len(starts) - 1)
    for name in ("loss", "val_loss"):
        _, values = run.series(name)
        if values:
            summary[f"last {name}"] = f"{values[-1]:.4g}"
            summary[f"best {name}"] = f"{min(values):.4g}"
    return summary


def _seconds_of_work(run: LoggedRun) -> float:
    """Return the total seconds of the run's parts, without the time between them."""
    total = 0.0
    began: float | None = None
    last = 0.0
    for line in run.lines:
        if line["type"] == "run":
            if began is not None:
                total += last - began
            began = line["time"]
        last = line["time"]
    if began is not None:
        total += last - began
    return total


def _events(run: LoggedRun) -> Iterator[tuple[str, str, str]]:
    """Yield the time, the step and the text of each event."""
    for line in run.lines:
        when = _when(line["time"])
        if line["type"] == "run":
            text = "begins"
            if line.get("resumed"):
                text = f"resumes from the checkpoint of step {line['step']}"
            yield when, str(line["step"]), text
        elif line["type"] == "event":
            text = line["event"]
            if line["facts"]:
                text += ": " + ", ".join(f"{name} {value}" for name, value in line["facts"].items())
            yield when, str(line["step"]), text
        elif line["type"] == "end":
            yield when, "", str(line["status"])


def _texts(values: Any) -> dict[str, str]:
    if not isinstance(values, dict):
        return {}
    return {str(name): str(value) for name, value in values.items()}


def _when(time: float) -> str:
    return datetime.fromtimestamp(time, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    if minutes:
        return f"{minutes} min {rest} s"
    return f"{seconds:.1f} s"
