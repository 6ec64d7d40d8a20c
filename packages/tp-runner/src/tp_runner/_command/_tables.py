"""Tables of a journal's results: CSV, and Parquet through pyarrow."""

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tp_core.errors import ConfigError

from tp_runner._command._readers import import_extra

__all__ = ["journal_of", "write_table"]

_WRITTEN = {".csv", ".parquet"}


def journal_of(output: Path) -> Path:
    """Return where results are kept line by line: the output itself, or a hidden file beside or in it."""
    if str(output) == "-" or output.suffix in {".jsonl", ".ndjson"}:
        return output
    if is_folder(output):
        return output / ".tp-run.jsonl"
    if output.suffix in _WRITTEN:
        return output.with_name(f".{output.name}.jsonl")
    msg = f"--output {output} must end in .jsonl, .csv or .parquet, be a folder for images, or - alone"
    raise ConfigError(msg)


def is_folder(output: Path) -> bool:
    """Whether results go into files of a folder."""
    return output.is_dir() or (not output.suffix and str(output) != "-")


def write_table(journal: Path, output: Path) -> None:
    """Write the journal as the table that was asked for, whole or not at all.

    A dictionary's entries are columns, any other result is the column ``result``.
    """
    if output.suffix not in _WRITTEN or journal == output:
        return
    if output.suffix == ".parquet":
        import_extra("pyarrow.parquet")  # before the work is lost to its lack
    if not journal.stat().st_size:
        return
    kept = output.with_name(f".{output.name}.kept")
    if output.suffix == ".csv":
        names = list(dict.fromkeys(name for row in _rows(journal) for name in row))
        with kept.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, names)
            writer.writeheader()
            writer.writerows(_rows(journal))
    else:
        pyarrow, parquet = import_extra("pyarrow"), import_extra("pyarrow.parquet")
        parquet.write_table(pyarrow.Table.from_pylist(list(_rows(journal))), kept)
    kept.replace(output)


def _rows(journal: Path) -> Iterator[dict[str, Any]]:
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
