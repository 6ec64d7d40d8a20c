"""Charts and timelines as figures of matplotlib: SVG elements of a page, or PNG files."""

import io
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tp_core.errors import ConfigError

from tp_trainer._reports._charts import Chart
from tp_trainer._reports._timelines import Timeline, TimeSpan

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST_POINTS = 1500  # of a curve; more are not visible
_SIZE_INCHES = (4.6, 2.7)


class _Palette(NamedTuple):
    """The colors of a figure."""

    ink: str
    grid: str
    mark: str
    paper: str
    series: Sequence[str]


# Unlikely colors: in the SVG they are replaced by variables of the page's light or dark theme.
_OF_PAGE = _Palette("#010203", "#010204", "#010205", "#010206", [f"#0102{0x10 + i:02x}" for i in range(8)])
_OF_PNG = _Palette(
    ink="#222222",
    grid="#dddddd",
    mark="#888888",
    paper="#ffffff",
    series=("#1f6fb2", "#c8501e", "#2e8b57", "#8a4fbf", "#b8860b", "#c2185b", "#00838f", "#5d4037"),
)
_VARIABLES = {
    _OF_PAGE.ink: "var(--ink)",
    _OF_PAGE.grid: "var(--grid)",
    _OF_PAGE.mark: "var(--mark)",
    _OF_PAGE.paper: "var(--card)",
    **{color: f"var(--c{i})" for i, color in enumerate(_OF_PAGE.series)},
}


def draw(*charts: Chart | Timeline, png: bool = False) -> "Figure":
    """Return a figure of one or several charts, two in a row.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        msg = "curves are drawn by matplotlib, which is not installed: pip install 'tp-trainer[report]'"
        raise ConfigError(msg) from error
    columns = min(len(charts), 2)
    rows = -(-len(charts) // columns)
    width, height = _SIZE_INCHES
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    palette = _OF_PNG if png else _OF_PAGE
    if not png:
        figure.patch.set_alpha(0)
    from matplotlib import rc_context

    with rc_context({"text.parse_math": False}):  # a name with two "$" is no formula
        for place, chart in enumerate(charts, start=1):
            axes = figure.add_subplot(rows, columns, place)
            if isinstance(chart, Timeline):
                _draw_spans(axes, chart, palette)
                _style(axes, chart.title, palette)
            else:
                _draw_curves(axes, chart, palette)
                _style(axes, chart.name, palette)
    return figure


def _draw_spans(axes: Any, timeline: Timeline, palette: _Palette) -> None:
    """Draw a bar for each span, with its number where there is room; paler for a row's later categories."""
    kinds = list(dict.fromkeys(span.kind for span in timeline.spans))
    categories: dict[int, dict[str, int]] = {}  # the place of each category in its row
    groups: dict[tuple[int, int], list[TimeSpan]] = {}  # of the same look
    for span in timeline.spans:
        places = categories.setdefault(span.row, {})
        place = places.setdefault(span.category, len(places))
        groups.setdefault((kinds.index(span.kind), place), []).append(span)
    whole = max((span.end for span in timeline.spans), default=0.0)
    unit, scale = ("ms", 1e3) if whole < 1 else ("s", 1.0)
    for (kind, place), spans in sorted(groups.items()):
        label = None if place else kinds[kind]
        bars = axes.barh(
            [span.row for span in spans],
            [scale * span.duration for span in spans],
            left=[scale * span.begin for span in spans],
            height=0.7,
            color=palette.series[kind % len(palette.series)],
            alpha=max(0.4, 1 - 0.3 * place),
            edgecolor=palette.paper,
            linewidth=0.5,
            label=label,
        )
        numbers = [span.number if span.duration > whole / 60 * len(span.number) else "" for span in spans]
        axes.bar_label(bars, numbers, label_type="center", color=palette.paper, fontsize=6)
    axes.set_yticks(range(len(timeline.rows)), timeline.rows)
    axes.invert_yaxis()
    axes.set_xlabel(unit, loc="left")  # the names of the kinds are at its right


def _draw_curves(axes: Any, chart: Chart, palette: _Palette) -> None:
    for curve in chart.curves:
        steps, values = _thinned(curve.steps, curve.values)
        linestyle = "--" if curve.dashed else "-"
        marker = "o" if len(steps) <= 30 else None
        axes.plot(
            steps,
            values,
            color=palette.series[curve.color % len(palette.series)],
            linestyle=linestyle,
            linewidth=1.4,
            marker=marker,
            markersize=3,
            label=curve.label,
        )
    for step, _ in chart.marks:
        axes.axvline(step, color=palette.mark, linestyle=":", linewidth=1)
    axes.set_xlabel("step")
    axes.xaxis.get_major_locator().set_params(integer=True)


def _style(axes: Any, title: str, palette: _Palette) -> None:
    axes.patch.set_alpha(0)
    axes.set_title(title, color=palette.ink, fontsize=10, loc="left")
    axes.xaxis.label.set(color=palette.ink, fontsize=8)
    axes.tick_params(colors=palette.ink, labelsize=8)
    axes.set_axisbelow(True)
    axes.grid(visible=True, color=palette.grid, linewidth=0.7)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(palette.grid)
    _, names = axes.get_legend_handles_labels()
    if len(names) < 2:
        return
    place: dict[str, Any] = {}
    if axes.patches:  # bars are everywhere, so the names stand below them
        place = {"loc": "upper right", "bbox_to_anchor": (1, -0.1), "ncols": 3, "borderaxespad": 0}
        place |= {"handlelength": 1, "columnspacing": 1}
    axes.legend(fontsize=8, labelcolor=palette.ink, frameon=False, **place)


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
    """Write the chart to a file."""
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
