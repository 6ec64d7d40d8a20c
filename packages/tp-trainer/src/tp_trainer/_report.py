"""The report of runs as one HTML page, from the logs in their folders; the page needs no network."""

import io
import json
import math
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tp_core.errors import ConfigError, StateError
from tp_core.files import atomic_part

from tp_trainer.loggers import LoggedRun, read_run

if TYPE_CHECKING:
    from matplotlib.figure import Figure


# -- Curves of runs, drawn by matplotlib, as SVG or PNG -------------------------------------------


_MOST_POINTS = 1500  # of a curve; more are not visible
_SIZE_INCHES = (4.6, 2.7)
_MARKS = {"run": "restart", "interruption": "interruption"}

# Unlikely colors: in the SVG they are replaced by variables of the page's light or dark theme.
_INK, _GRID, _MARK, _CARD = "#010203", "#010204", "#010205", "#010206"
_COLORS = tuple(f"#0102{0x10 + i:02x}" for i in range(8))
_PNG_COLORS = ("#1f6fb2", "#c8501e", "#2e8b57", "#8a4fbf", "#b8860b", "#c2185b", "#00838f", "#5d4037")
_VARIABLES = {
    _INK: "var(--ink)",
    _GRID: "var(--grid)",
    _MARK: "var(--mark)",
    _CARD: "var(--card)",
    **{color: f"var(--c{i})" for i, color in enumerate(_COLORS)},
}


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


@dataclass(frozen=True, slots=True)
class Timeline:
    """What each rank computed when.

    Attributes:
        spans: The row, the begin and the duration in seconds, the kind, the number, and the category of each
            span, as its stage.
    """

    name: str
    rows: list[str]
    spans: list[tuple[int, float, float, str, str, str]]

    @property
    def title(self) -> str:
        """The name, and the share of the time in which rows are empty."""
        if not self.spans:
            return self.name
        first = min(begin for _, begin, *_ in self.spans)
        whole = max(begin + seconds for _, begin, seconds, *_ in self.spans) - first
        busy, reached = 0.0, [first] * len(self.rows)  # spans may lie within others
        for row, begin, seconds, *_ in sorted(self.spans):
            busy += max(0.0, begin + seconds - max(begin, reached[row]))
            reached[row] = max(reached[row], begin + seconds)
        idle = 1 - busy / whole / len(self.rows) if whole else 0.0
        return f"{self.name}: idle {idle:.0%}"


def _read_timeline(path: Path) -> Timeline:
    try:
        events = json.loads(path.read_text("utf-8"))["traceEvents"]
        spans = [e for e in events if e["ph"] == "X"]
        names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
        ids = sorted({e["tid"] for e in spans})
        found = []
        for e in spans:
            kind = e["name"].rstrip("0123456789 ")
            number = e["name"][len(kind) :].strip()
            row, category = ids.index(e["tid"]), str(e.get("cat", ""))
            found.append((row, e["ts"] / 1e6, e["dur"] / 1e6, kind, number, category))
    except (ValueError, KeyError, TypeError) as error:
        msg = f"{path} is not a trace of Chrome's format: {error!r}; move it out of the run's folder"
        raise StateError(msg) from error
    return Timeline(path.name.removesuffix(".trace.json"), [str(names.get(i, i)) for i in ids], found)


_FIRST = ("loss", "accuracy", "learning_rate", "samples_per_s", "steps_per_s")


def charts(runs: Sequence[tuple[str, LoggedRun]]) -> list[Chart]:
    """Return a chart for each logged name, training with validation; the loss comes first."""
    names = dict.fromkeys(
        name.removeprefix("val_").removeprefix("epoch_") for _, run in runs for name in run.names
    )
    order = sorted(names, key=lambda n: _FIRST.index(n) if n in _FIRST else len(_FIRST))
    return [
        Chart(name, list(_curves(name, runs)), [mark for _, run in runs for mark in _marks(run)])
        for name in order
    ]


def _curves(name: str, runs: Sequence[tuple[str, LoggedRun]]) -> Iterator[Curve]:
    several = len(runs) > 1
    for number, (label, run) in enumerate(runs):
        trained = name if name in run.names else f"epoch_{name}"  # steps, or else means of epochs
        for full in (trained, f"val_{name}"):
            steps, values = run.series(full)
            if steps:
                is_val = full != trained
                color = number if several else int(is_val)
                text = (f"{label} " if several else "") + ("validation" if is_val else "training")
                plain = several and f"val_{name}" not in run.names
                yield Curve(label if plain else text, steps, values, color, dashed=several and is_val)


def _marks(run: LoggedRun) -> Iterator[tuple[int, str]]:
    for line in run.lines:
        if line["type"] == "run" and line["step"]:
            yield int(line["step"]), _MARKS["run"]
        elif line["type"] == "event" and line["event"] in _MARKS:
            yield int(line["step"]), _MARKS[line["event"]]


def draw(*charts: Chart | Timeline, png: bool = False) -> "Figure":
    """Return a figure of one or several charts, two in a row."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        msg = "curves are drawn by matplotlib, which is not installed: pip install 'tp-trainer[report]'"
        raise ConfigError(msg) from error
    columns = min(len(charts), 2)
    rows = -(-len(charts) // columns)
    width, height = _SIZE_INCHES
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    if not png:
        figure.patch.set_alpha(0)
    for place, chart in enumerate(charts, start=1):
        axes = figure.add_subplot(rows, columns, place)
        ink, grid, mark = ("#222222", "#dddddd", "#888888") if png else (_INK, _GRID, _MARK)
        colors = _PNG_COLORS if png else _COLORS
        if isinstance(chart, Timeline):
            _draw_spans(axes, chart, colors, "#ffffff" if png else _CARD)
            _style(axes, chart.title, ink, grid)
        else:
            _draw_curves(axes, chart, colors, mark)
            _style(axes, chart.name, ink, grid)
    return figure


def _draw_spans(axes: Any, timeline: Timeline, colors: Sequence[str], paper: str) -> None:
    """Draw a bar for each span, with its number where there is room; paler for a row's later categories."""
    kinds = list(dict.fromkeys(span[3] for span in timeline.spans))
    seen: dict[int, dict[str, int]] = {}  # the place of each category in its row
    drawn: dict[tuple[int, int], list[tuple[int, float, float, str, str, str]]] = {}
    for span in timeline.spans:
        own = seen.setdefault(span[0], {})
        place = own.setdefault(span[5], len(own))
        drawn.setdefault((kinds.index(span[3]), place), []).append(span)
    whole = max((begin + seconds for _, begin, seconds, *_ in timeline.spans), default=0.0)
    unit, scale = ("ms", 1e3) if whole < 1 else ("s", 1.0)
    for (number, place), spans in sorted(drawn.items()):
        bars = axes.barh(
            [row for row, *_ in spans],
            [scale * span[2] for span in spans],
            left=[scale * span[1] for span in spans],
            height=0.7,
            color=colors[number % len(colors)],
            alpha=max(0.4, 1 - 0.3 * place),
            edgecolor=paper,
            linewidth=0.5,
            label=None if place else kinds[number],
        )
        texts = [span[4] if span[2] > whole / 60 * len(span[4]) else "" for span in spans]
        axes.bar_label(bars, texts, label_type="center", color=paper, fontsize=6)
    axes.set_yticks(range(len(timeline.rows)), timeline.rows)
    axes.invert_yaxis()
    axes.set_xlabel(unit, loc="left")  # the names of the kinds are at its right


def _draw_curves(axes: Any, chart: Chart, colors: Sequence[str], mark: str) -> None:
    for curve in chart.curves:
        steps, values = _thinned(curve.steps, curve.values)
        axes.plot(
            steps,
            values,
            color=colors[curve.color % len(colors)],
            linestyle="--" if curve.dashed else "-",
            linewidth=1.4,
            marker="o" if len(steps) <= 30 else None,
            markersize=3,
            label=curve.label,
        )
    for step, _ in chart.marks:
        axes.axvline(step, color=mark, linestyle=":", linewidth=1)
    axes.set_xlabel("step")
    axes.xaxis.get_major_locator().set_params(integer=True)


def _style(axes: Any, title: str, ink: str, grid: str) -> None:
    axes.patch.set_alpha(0)
    axes.set_title(title, color=ink, fontsize=10, loc="left")
    axes.xaxis.label.set(color=ink, fontsize=8)
    axes.tick_params(colors=ink, labelsize=8)
    axes.set_axisbelow(True)
    axes.grid(visible=True, color=grid, linewidth=0.7)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(grid)
    if len(axes.get_legend_handles_labels()[0]) > 1:
        is_covered = bool(axes.patches)  # by bars, which are everywhere
        place = {"loc": "upper right", "bbox_to_anchor": (1, -0.1), "ncols": 3, "borderaxespad": 0}
        place |= {"handlelength": 1, "columnspacing": 1}
        axes.legend(fontsize=8, labelcolor=ink, frameon=False, **(place if is_covered else {}))


def svg(chart: Chart | Timeline) -> str:
    """Return the chart as an SVG element, with variables of the page as colors."""
    figure, out = draw(chart), io.StringIO()
    from matplotlib import rc_context

    with rc_context({"svg.fonttype": "none", "svg.hashsalt": chart.name}):
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    text = text[text.index("<svg") :]
    for color, variable in _VARIABLES.items():
        text = text.replace(color, variable)
    text = re.sub(r'<svg ([^>]*?)width="[^"]*" height="[^"]*"', r"<svg \1", text, count=1)
    text = re.sub(r'font: ([\d.]+)px [^;"]*', r"font: \1px system-ui, sans-serif", text)
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    return re.sub(r' id="(figure|axes|patch|line2d|text|matplotlib|xtick|ytick|legend)[^"]*"', "", text)


def png(chart: Chart, path: Path) -> None:
    draw(chart, png=True).savefig(path, format="png", dpi=160, facecolor="white")


def _thinned(steps: Sequence[int], values: Sequence[float]) -> tuple[list[int], list[float]]:
    """Return a curve with fewer points: the lowest and the highest of each stretch, in order."""
    finite = [value if math.isfinite(value) else math.nan for value in values]
    if len(steps) <= _MOST_POINTS:
        return list(steps), finite
    size = math.ceil(len(steps) / (_MOST_POINTS / 2))
    kept: list[int] = []
    for start in range(0, len(steps), size):
        stretch = [i for i in range(start, min(start + size, len(steps))) if finite[i] == finite[i]]
        if stretch:
            kept += sorted({min(stretch, key=finite.__getitem__), max(stretch, key=finite.__getitem__)})
    return [steps[i] for i in kept], [finite[i] for i in kept]


# -- The story of a run, in words and tables ------------------------------------------------------


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
    """Return the total seconds of the run's parts, without the time between them."""
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
            what = f"resumes from the checkpoint of step {step}" if line.get("resumed") else "begins"
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


# -- The page -------------------------------------------------------------------------------------


_TEMPLATE = Path(__file__).with_suffix(".html.j2")


def render(runs: Sequence[LoggedRun]) -> str:
    from jinja2 import Environment
    from markupsafe import Markup

    if not runs:
        msg = "a report needs at least one run: give its folder"
        raise ConfigError(msg)
    named = list(zip(labels(runs), runs, strict=True))
    # Profilers write traces beside the log of a run, in Chrome's format.
    traces = [path for run in runs for path in sorted(run.path.parent.glob("*.trace.json"))]
    pictures: list[Chart | Timeline] = [*charts(named), *map(_read_timeline, traces)]
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    page = environment.from_string(_TEMPLATE.read_text(encoding="utf-8"))
    return page.render(
        stories=[story_of(label, run) for label, run in named],
        # matplotlib has escaped the texts in the figures
        figures=[Markup(svg(chart)) for chart in pictures],  # noqa: S704
    )


def write_report(
    paths: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str] | None = None,
    *,
    pictures: str | os.PathLike[str] | None = None,
) -> list[Path]:
    """Write one HTML page of runs, as ``tp report`` does.

    For the run that this program has just ended there is :meth:`tp_trainer.History.report`.

    Args:
        paths: The folders of the runs, or their ``log.jsonl``.
        out: The file; by default ``report.html`` in the first run's folder.
        pictures: A folder for each chart as a PNG file; by default there are none.

    Returns:
        The page, then the pictures.

    Raises:
        ConfigError: No run is given, or matplotlib is not installed.
        FileNotFoundError: A folder has no log of a run.
        StateError: A file is not such a log.
        OSError: A file cannot be written.

    Example:
        >>> write_report(["first", "second"], "both.html")  # doctest: +SKIP
        [PosixPath('both.html')]
    """
    runs = [read_run(path) for path in paths]
    written = [write_page(runs, out or (runs[0].path.parent if runs else Path()) / "report.html")]
    for chart in () if pictures is None else charts(list(zip(labels(runs), runs, strict=True))):
        name = "".join(c if c.isalnum() or c in "-_." else "_" for c in chart.name)
        written.append(Path(pictures or "", f"{name}.png"))
        written[-1].parent.mkdir(parents=True, exist_ok=True)
        with atomic_part(written[-1]) as part:
            png(chart, part)
    return written


def write_page(runs: Sequence[LoggedRun], out: str | os.PathLike[str]) -> Path:
    """Write the page of ``runs`` to ``out``, and return its path."""
    text, out = render(runs), Path(out)
    with atomic_part(out, mode=0o600) as part:  # the page has the program's arguments
        part.write_text(
            text, encoding="utf-8", errors="backslashreplace"
        )  # file names may not be valid UTF-8
    return out
