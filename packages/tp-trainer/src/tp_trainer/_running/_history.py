"""The records of a run, in the program that made it: as tables, curves and a page."""

import html
import math
import os
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from tp_core.errors import ConfigError
from tp_core.output import in_notebook

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from tp_trainer.loggers._jsonl import LoggedRun


# Colors that are readable on light and dark: Python cannot find out which theme the notebook has.
_NOTEBOOK_COLORS = (
    "--ink:currentColor;--grid:#8886;--mark:#a07408;--c0:#2f86cc;--c1:#d9602b;--c2:#2e9a60;--c3:#9a63cc;"
    "--c4:#a07408;--c5:#d1396f;--c6:#0b8f9b;--c7:#8a6658"
)


@dataclass(frozen=True, slots=True)
class EpochRecord:
    """The record of one epoch.

    Attributes:
        epoch: Its number, from 1.
        steps: Optimizer steps so far, over all epochs.
        samples: Samples trained on in it, over all ranks.
        seconds: How many seconds its training took; validation is not in it.
        learning_rate: The first parameter group's rate, at the end of the epoch.
        train: Means over its samples of what the step returned, by name, with "loss".
        val: The same over the validation samples; empty without a validation loader.
        data: What a loader such as tp-data's measured, over all ranks, since the epoch began or was resumed:
            its sums by name, ``"tokens_per_s"``, ``"fill"``, and ``"wait_s"`` of a rank. Empty for others.
    """

    epoch: int
    steps: int
    samples: int
    seconds: float
    learning_rate: float
    train: Mapping[str, float]
    val: Mapping[str, float] = field(default_factory=dict)
    data: Mapping[str, float] = field(default_factory=dict)

    @property
    def samples_per_s(self) -> float:
        """Training throughput, in samples per second over all ranks."""
        if self.seconds:
            return self.samples / self.seconds
        return math.inf

    @property
    def metrics(self) -> dict[str, float]:
        """All means by name; validation means are named ``"val_..."``."""
        return {**self.train, **{f"val_{name}": value for name, value in self.val.items()}}

    if not TYPE_CHECKING:  # a type checker would take every attribute for one that exists

        def __getattr__(self, name: str) -> Any:
            if name in self.__slots__ or name.startswith("_") or name not in self.metrics:
                return object.__getattribute__(self, name)  # raises the error that led here
            msg = f"an EpochRecord has its means by name; write record.metrics[{name!r}]"
            raise AttributeError(msg, name=name, obj=self)

    def __getitem__(self, name: object) -> NoReturn:
        """Refuse a mean by its name alone: training and validation both have it."""
        record = f"record.metrics[{name!r}]"
        msg = f"an EpochRecord has no items, got [{name!r}]; its means are a dict: write {record}"
        raise ConfigError(msg)

    def to_dict(self) -> dict[str, Any]:
        """Return the attributes by name, as checkpoints store them."""
        # dataclasses.asdict takes ten times as long, and each checkpoint holds the records of all epochs.
        values = {name: getattr(self, name) for name in self.__slots__}
        return values | {"train": dict(self.train), "val": dict(self.val), "data": dict(self.data)}

    def __str__(self) -> str:
        values = [f"{name}={value:.4g}" for name, value in self.metrics.items()]
        rate = f"{self.samples_per_s:,.0f} samples/s"
        if "fill" in self.data:
            rate = f"{self.data['tokens_per_s']:,.0f} tokens/s  fill={self.data['fill']:.3g}"
        return f"{'  '.join(values)}  lr={self.learning_rate:.3g}  {rate}"


@dataclass(frozen=True, slots=True)
class History:
    """The records of all epochs of a run; print it to see a table, and a notebook shows curves, too.

    Attributes:
        epochs: One record for each epoch, in order.
        folder: The folder of the run's checkpoints; it also holds the run's log. ``None`` for a run
            without one.

    Example:
        >>> history = History((EpochRecord(1, 8, 64, 0.5, 0.1, {"loss": 2.0}),))
        >>> history.to_dict()["loss"]
        [2.0]
    """

    epochs: tuple[EpochRecord, ...]
    folder: Path | None = field(default=None, compare=False)

    def __len__(self) -> int:
        return len(self.epochs)

    def __getitem__(self, index: int) -> EpochRecord:
        if isinstance(index, str):
            msg = (
                f"a History has its epochs by number, got {index!r}; write history.to_dict()[{index!r}] for "
                "the values of all epochs"
            )
            raise ConfigError(msg)
        return self.epochs[index]

    if not TYPE_CHECKING:  # as in an EpochRecord

        def __getattr__(self, name: str) -> Any:
            if name in self.__slots__ or name.startswith("_"):
                return object.__getattribute__(self, name)
            columns = self.to_dict()
            if name != "history" and name not in columns:
                return object.__getattribute__(self, name)
            wanted = f"[{name!r}]" if name in columns else ""
            msg = f"a History has no {name!r}; write history.to_dict(){wanted} for the values of all epochs"
            raise AttributeError(msg, name=name, obj=self)

    def __iter__(self) -> Iterator[EpochRecord]:
        return iter(self.epochs)

    def __str__(self) -> str:
        columns = {name: [name, *map(_worded, values)] for name, values in self.to_dict().items()}
        widths = {name: max(map(len, cells)) for name, cells in columns.items()}
        rows = zip(*columns.values(), strict=True)
        lines = [
            "  ".join(cell.rjust(width) for cell, width in zip(row, widths.values(), strict=True))
            for row in rows
        ]
        if not lines:
            lines = ["no epoch has ended"]
        if self.folder is not None:
            command = f"tp convert {shlex.quote(str(self.folder))} model.safetensors"
            lines.append(f"checkpoints: {self.folder}; {command} writes the weights of the newest")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, list[Any]]:
        """Return the records as columns: one value per epoch, ``None`` where an epoch has none.

        The names are "epoch", "steps", "samples", "seconds", "learning_rate" and the names of the means;
        validation means are named ``"val_..."``.
        """
        rows = [
            {
                "epoch": record.epoch,
                "steps": record.steps,
                "samples": record.samples,
                "seconds": record.seconds,
                "learning_rate": record.learning_rate,
                **record.metrics,
            }
            for record in self.epochs
        ]
        names = dict.fromkeys(name for row in rows for name in row)
        return {name: [row.get(name) for row in rows] for name in names}

    def to_dataframe(self) -> "pd.DataFrame":
        """Return the columns of :meth:`to_dict` as a pandas data frame, indexed by "epoch".

        Raises:
            ConfigError: pandas is not installed.
        """
        try:
            import pandas as pd
        except ImportError as error:
            msg = "to_dataframe() needs pandas, which is not installed: pip install 'tp-trainer[pandas]'"
            raise ConfigError(msg) from error
        return pd.DataFrame(self.to_dict() or {"epoch": []}).set_index("epoch")

    def plot(self, *names: str) -> "Figure":
        """Draw a chart for each metric, training beside validation, over the optimizer steps.

        Args:
            *names: The metrics to draw, as "loss"; by default all, and the learning rate.

        Returns:
            A matplotlib figure. Notebooks show it; ``figure.savefig("run.png")`` writes it.

        Raises:
            ConfigError: matplotlib is not installed, or there are no numbers of that name.
        """
        from tp_trainer._reports import charts, draw

        by_name = {chart.name: chart for chart in charts([("", self._as_logged())])}
        missing = [name for name in names if name not in by_name]
        if missing or not by_name:
            listed = ", ".join(map(repr, missing)) or "anything"
            available = ", ".join(by_name) or "none, as no epoch ended"
            msg = f"the run has no numbers called {listed}; it has {available}"
            raise ConfigError(msg)
        if in_notebook():
            import matplotlib.pyplot as plt

            plt.close(plt.figure())  # loads the notebook's backend: without it no figure is shown
        return draw(*(by_name[name] for name in names or by_name), png=True)

    def report(self, out: str | os.PathLike[str] | None = None) -> Path:
        """Write one HTML page of the run, as ``tp report`` does, and return its path.

        If the run has logged its steps into its folder, the page shows them; otherwise it shows the epochs.

        Args:
            out: The file; by default ``report.html`` in the run's folder.

        Raises:
            ConfigError: The run has no folder, and ``out`` is not given; or matplotlib is not installed.
            OSError: The file cannot be written.
        """
        from tp_trainer._reports import write_page
        from tp_trainer.loggers._jsonl import FILENAME, read_run

        if out is None:
            if self.folder is None:
                msg = "report() of a run without a folder needs a place: history.report('run.html')"
                raise ConfigError(msg)
            out = self.folder / "report.html"
        is_logged = self.folder is not None and (self.folder / FILENAME).is_file()
        if self.folder and is_logged:
            run = read_run(self.folder)
        else:
            run = self._as_logged()
        return write_page([run], out)

    def _as_logged(self) -> "LoggedRun":
        """Return the numbers of the epochs in the form of a run's log, without times and environment."""
        from tp_trainer.loggers._jsonl import FILENAME, logged_epochs

        records = [record.to_dict() for record in self.epochs]
        return logged_epochs((self.folder or Path("run")) / FILENAME, records)

    def _repr_html_(self) -> str:
        """Return what a notebook shows: the table, and curves if matplotlib is installed."""
        columns = self.to_dict()
        cells = []
        for row in range(len(self)):
            worded = [_worded(column[row]) for column in columns.values()]
            cells.append("".join(f"<td>{text}</td>" for text in worded))
        head = "".join(f"<th>{html.escape(name)}</th>" for name in columns)
        table = f"<table><tr>{head}</tr>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"
        return (
            f"<div style='{_NOTEBOOK_COLORS}'><div style='overflow:auto;max-height:24em'>{table}</div>"
            f"{self._curves_html()}</div>"
        )

    def _curves_html(self) -> str:
        if len(self) < 2:  # a point is not a curve
            return ""
        from tp_trainer._reports import charts, svg

        try:
            drawn = [svg(chart) for chart in charts([("", self._as_logged())])]
        except ConfigError:  # no matplotlib: show the table alone
            return ""
        figures = "".join(f"<div style='flex:1 1 18em;max-width:30em'>{figure}</div>" for figure in drawn)
        return f"<div style='display:flex;flex-wrap:wrap;gap:1em'>{figures}</div>"


def _worded(value: float | None) -> str:
    if value is None:
        return ""
    if isinstance(value, int):
        return str(value)
    return f"{value:.4g}"
