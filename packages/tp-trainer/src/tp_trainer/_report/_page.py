"""The page itself."""

import os
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

from tp_core.errors import ConfigError
from tp_core.internal import write_atomically

from tp_trainer._report._figures import charts, png, svg
from tp_trainer._report._story import labels, tell
from tp_trainer.loggers._reading import LoggedRun, read_run

__all__ = ["render", "write_page", "write_pictures", "write_report"]

_TEMPLATE = Path(__file__).parent / "page.html.j2"


def render(paths: Iterable[str | os.PathLike[str]]) -> str:
    """Return the page of the runs in ``paths``, as HTML.

    Raises:
        ConfigError: No run is given, or matplotlib is not installed.
        FileNotFoundError: A folder has no record of a run.
        StateError: A file is not such a record.
    """
    return _render([read_run(path) for path in paths])


def _render(runs: Sequence[LoggedRun]) -> str:
    from jinja2 import Environment
    from markupsafe import Markup

    if not runs:
        msg = "a report needs at least one run: give its folder"
        raise ConfigError(msg)
    named = list(zip(labels(runs), runs, strict=True))
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    page = environment.from_string(_TEMPLATE.read_text(encoding="utf-8"))
    return page.render(
        stories=[tell(label, run) for label, run in named],
        # matplotlib has escaped what is written in them
        figures=[Markup(svg(chart)) for chart in charts(named)],  # noqa: S704
    )


def write_report(paths: Iterable[str | os.PathLike[str]], out: str | os.PathLike[str]) -> Path:
    """Write the page of the runs in ``paths`` to ``out``, and return its path.

    Raises:
        ConfigError: No run is given, or matplotlib is not installed.
        FileNotFoundError: A folder has no record of a run.
        StateError: A file is not such a record.
        OSError: The file cannot be written.
    """
    return write_page([read_run(path) for path in paths], out)


def write_page(runs: Sequence[LoggedRun], out: str | os.PathLike[str]) -> Path:
    """Write the page of ``runs`` to ``out``, and return its path.

    Raises:
        ConfigError: No run is given, or matplotlib is not installed.
        OSError: The file cannot be written.
    """
    text, out = _render(runs), Path(out)
    write_atomically(lambda part: _write(part, text), out, mode=0o600)  # it has the program's arguments
    return out


def _write(part: Path, text: str) -> None:
    part.write_text(text, encoding="utf-8", errors="backslashreplace")  # names of files need not be text


def write_pictures(paths: Iterable[str | os.PathLike[str]], folder: str | os.PathLike[str]) -> list[Path]:
    """Write each chart of the runs in ``paths`` as a PNG file into ``folder``, and return the files.

    Raises:
        As :func:`write_report`.
    """
    runs = [read_run(path) for path in paths]
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for chart in charts(list(zip(labels(runs), runs, strict=True))):
        name = "".join(c if c.isalnum() or c in "-_." else "_" for c in chart.name)
        write_atomically(partial(png, chart), folder / f"{name}.png")
        written.append(folder / f"{name}.png")
    return written
