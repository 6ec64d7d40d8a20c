"""``tp explain``: what the documents say about an error."""

import re
from importlib.resources import files
from typing import Annotated

import typer
from rich.console import Console
from rich.markdown import Markdown

from tp_core._messages import did_you_mean
from tp_core.errors import ConfigError

app = typer.Typer()


@app.command()
def explain(
    error: Annotated[
        str | None, typer.Argument(help="ConfigError, or config-error; all without one.")
    ] = None,
) -> None:
    """Print what an error of tp means and what to do about it."""
    sections = _sections()
    if error is None:
        typer.echo("\n".join(sections))
        return
    name = re.sub(r"(?<=[a-z])(?=[A-Z])", "-", error.rpartition("#")[2].rpartition(".")[2]).lower()
    if name not in sections:
        msg = f"no error of tp is called {error!r}{did_you_mean(name, sections)}"
        raise ConfigError(msg)
    Console().print(Markdown(sections[name]))


def _sections() -> dict[str, str]:
    """Return the sections of the page about errors, by the errors' names in its address."""
    page = files("tp_core.cli").joinpath("errors.md").read_text(encoding="utf-8")
    found = re.findall(r"^\(([\w-]+)\)=\n(#.*?)(?=^\(|^## |\Z)", page, re.MULTILINE | re.DOTALL)
    return {name: text.strip() for name, text in found}
