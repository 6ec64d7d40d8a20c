"""The tables of ``tp run``: what ``--output`` names, and results as CSV or Parquet."""

import csv
import json
import os
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from tp_core.errors import ConfigError, StateError
from tp_core.files import write_atomically

from tp_runner._command._records import import_extra

_TABLES = {".csv", ".parquet"}


def journal_of(output: Path) -> Path:
    """Return where results are kept line by line: the output itself, or a hidden file beside or in it."""
    if str(output) == "-" or output.suffix in {".jsonl", ".ndjson"}:
        if output.is_symlink():  # a link that the user made: the journal itself follows none
            return Path(os.path.realpath(output))
        return output
    if is_folder(output):
        return output / ".tp-run.jsonl"
    if output.suffix in _TABLES:
        return output.with_name(f".{output.name}.jsonl")
    msg = f"--output {output} must end in .jsonl, .csv or .parquet, be a folder for images, or - alone"
    raise ConfigError(msg)


def is_folder(output: Path) -> bool:
    return output.is_dir() or (not output.suffix and str(output) != "-")


def is_table(output: Path) -> bool:
    return output.suffix in _TABLES


def write_table(journal: Path, output: Path) -> None:
    """Write the journal as a table, whole or not at all.

    A dictionary's entries are columns, any other result is the column ``result``.
    """
    if not is_table(output) or journal == output:
        return
    write = _write_parquet
    if output.suffix == ".csv":
        write = _write_csv
    write_atomically(partial(write, journal), output)


def _write_csv(journal: Path, part: Path) -> None:
    with part.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, _columns(rows_of(journal)))
        writer.writeheader()
        writer.writerows(rows_of(journal))


def _write_parquet(journal: Path, part: Path) -> None:
    pyarrow = import_extra("pyarrow")
    rows = list(rows_of(journal))
    columns: dict[str, list[Any]] = {}
    for name in _columns(rows):
        columns[name] = [row.get(name) for row in rows]
    try:
        table = pyarrow.table(columns)
    except (ValueError, TypeError, NotImplementedError) as error:  # pyarrow's are these, too
        msg = f"the results do not fit into the columns of a table: {error}; they are all in {journal}"
        raise StateError(msg) from error
    import_extra("pyarrow.parquet").write_table(table, part)


def _columns(rows: Iterable[dict[str, Any]]) -> list[str]:
    names = {"source": None, "line": None}  # a dict, which keeps the order of the columns
    for row in rows:
        names |= dict.fromkeys(row)
    return list(names)


def rows_of(journal: Path) -> Iterator[dict[str, Any]]:
    with journal.open(encoding="utf-8") as file:
        for line in file:
            entry = json.loads(line)
            row = {"source": entry["source"], "line": entry["line"]}
            if "error" in entry:
                row["error"] = f"{entry['error']['type']}: {entry['error']['message']}"
            elif isinstance(entry["result"], dict):
                row |= entry["result"]
            else:
                row["result"] = entry["result"]
            yield row
