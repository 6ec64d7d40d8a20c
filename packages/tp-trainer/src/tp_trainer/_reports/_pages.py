"""The report of runs as one HTML page, from the logs in their folders; the page needs no network."""

import os
from collections.abc import Sequence
from pathlib import Path

from tp_core.errors import ConfigError
from tp_core.files import atomic_part

from tp_trainer._reports._charts import Chart, charts
from tp_trainer._reports._figures import png, svg
from tp_trainer._reports._stories import story_of
from tp_trainer._reports._timelines import Timeline, read_timeline
from tp_trainer.loggers import LoggedRun, read_run

_TEMPLATE = Path(__file__).with_name("page.html.j2")


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
    if out is None and runs:
        out = runs[0].path.parent / "report.html"
    written = [write_page(runs, out or "report.html")]
    if pictures is None:
        return written
    folder = Path(pictures)
    folder.mkdir(parents=True, exist_ok=True)
    for chart in charts(_labelled(runs)):
        name = "".join(c if c.isalnum() or c in "-_." else "_" for c in chart.name)
        path = folder / f"{name}.png"
        with atomic_part(path) as part:
            png(chart, part)
        written.append(path)
    return written


def write_page(runs: Sequence[LoggedRun], out: str | os.PathLike[str]) -> Path:
    """Write the page of ``runs`` to ``out``, and return its path."""
    text = _render(runs)
    out = Path(out)
    # The page has the program's arguments. File names in it may not be valid UTF-8.
    with atomic_part(out, mode=0o600) as part:
        part.write_text(text, encoding="utf-8", errors="backslashreplace")
    return out


def _render(runs: Sequence[LoggedRun]) -> str:
    from jinja2 import Environment
    from markupsafe import Markup

    if not runs:
        msg = "a report needs at least one run: give its folder"
        raise ConfigError(msg)
    labelled = _labelled(runs)
    # Profilers write traces beside the log of a run, in Chrome's format.
    traces = [path for run in runs for path in sorted(run.path.parent.glob("*.trace.json"))]
    pictures: list[Chart | Timeline] = [*charts(labelled), *map(read_timeline, traces)]
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    page = environment.from_string(_TEMPLATE.read_text(encoding="utf-8"))
    return page.render(
        stories=[story_of(label, run) for label, run in labelled],
        # matplotlib has escaped the texts in the figures
        figures=[Markup(svg(chart)) for chart in pictures],  # noqa: S704
    )


def _labelled(runs: Sequence[LoggedRun]) -> list[tuple[str, LoggedRun]]:
    """Return each run with its folder's name, or with more of the path if two names are equal."""
    folders = [run.path.absolute().parent for run in runs]
    names = [folder.name for folder in folders]
    labelled = []
    for folder, run in zip(folders, runs, strict=True):
        label = folder.name
        if names.count(label) > 1:
            label = str(Path(*folder.parts[-3:]))
        labelled.append((label, run))
    return labelled
