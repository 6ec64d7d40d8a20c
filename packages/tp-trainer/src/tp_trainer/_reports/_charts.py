"""The charts of runs: which curves belong together."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tp_trainer.loggers import LoggedRun

_MARKS = {"run": "restart", "interruption": "interruption"}
_FIRST = ("loss", "accuracy", "learning_rate", "samples_per_s", "steps_per_s")


@dataclass(frozen=True, slots=True)
class Curve:
    """One curve."""

    label: str
    steps: Sequence[int]
    values: Sequence[float]
    color: int
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class Chart:
    """Curves that belong together."""

    name: str
    curves: list[Curve]
    marks: list[tuple[int, str]] = field(default_factory=list)


def charts(runs: Sequence[tuple[str, LoggedRun]]) -> list[Chart]:
    """Return a chart for each logged name, training with validation; the loss comes first."""
    names: dict[str, None] = {}
    for _, run in runs:
        for name in run.names:
            names[name.removeprefix("val_").removeprefix("epoch_")] = None
    marks = [mark for _, run in runs for mark in _marks(run)]
    return [Chart(name, list(_curves(name, runs)), list(marks)) for name in sorted(names, key=_rank)]


def _rank(name: str) -> int:
    if name in _FIRST:
        return _FIRST.index(name)
    return len(_FIRST)


def _curves(name: str, runs: Sequence[tuple[str, LoggedRun]]) -> Iterator[Curve]:
    """Yield the curves of training and validation: a color a run, or one for each if there is one run."""
    several = len(runs) > 1
    for number, (label, run) in enumerate(runs):
        # Values of steps are shown; where there are none, means of epochs.
        trained = name if name in run.names else f"epoch_{name}"
        steps, values = run.series(trained)
        val_steps, val_values = run.series(f"val_{name}")
        if not several:
            if steps:
                yield Curve("training", steps, values, 0)
            if val_steps:
                yield Curve("validation", val_steps, val_values, 1)
            continue
        has_validation = f"val_{name}" in run.names
        if steps:
            text = f"{label} training" if has_validation else label
            yield Curve(text, steps, values, number)
        if val_steps:
            yield Curve(f"{label} validation", val_steps, val_values, number, dashed=True)


def _marks(run: LoggedRun) -> Iterator[tuple[int, str]]:
    for line in run.lines:
        if line["type"] == "run" and line["step"]:
            yield int(line["step"]), _MARKS["run"]
        elif line["type"] == "event" and line["event"] in _MARKS:
            yield int(line["step"]), _MARKS[line["event"]]
