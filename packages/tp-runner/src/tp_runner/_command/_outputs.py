"""What results become beside lines: tables of CSV or, through pyarrow, Parquet; pictures in a folder."""

import csv
import json
import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from tp_core.errors import ConfigError, StateError
from tp_core.internal import showing_system_errors, sync_folder, write_atomically

from tp_runner._command._readers import import_extra

__all__ = ["is_folder", "journal_of", "with_images", "write_table"]

_WRITTEN = {".csv", ".parquet"}


def journal_of(output: Path) -> Path:
    """Return where results are kept line by line: the output itself, or a hidden file beside or in it."""
    if str(output) == "-" or output.suffix in {".jsonl", ".ndjson"}:
        return Path(os.path.realpath(output)) if output.is_symlink() else output  # a link that the user made
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

    Raises:
        StateError: Results of one column are of types that no column of Parquet can have together.
    """
    if output.suffix not in _WRITTEN or journal == output:
        return
    write = _write_csv if output.suffix == ".csv" else _write_parquet
    write_atomically(partial(write, journal), output)


def _write_csv(journal: Path, part: Path) -> None:
    with part.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, _columns(_rows(journal)))
        writer.writeheader()
        writer.writerows(_rows(journal))


def _write_parquet(journal: Path, part: Path) -> None:
    pyarrow, rows = import_extra("pyarrow"), list(_rows(journal))
    try:
        table = pyarrow.table({name: [row.get(name) for row in rows] for name in _columns(rows)})
    except (ValueError, TypeError, NotImplementedError) as error:  # pyarrow's are these, too
        msg = f"the results do not fit into the columns of a table: {error}; they are all in {journal}"
        raise StateError(msg) from error
    import_extra("pyarrow.parquet").write_table(table, part)


def _columns(rows: Iterable[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(["source", "line", *(name for row in rows for name in row)]))


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


def with_images(
    work: Callable[[Any], Any], *, reads: bool, folder: Path | None, batched: bool
) -> Callable[[Any], Any]:
    """Wrap work on pictures as work on the paths of their files.

    Args:
        work: What is applied to an item, or to a batch.
        reads: Whether it gets pictures, as ``PIL.Image`` in RGB, instead of paths.
        folder: Where results, which are pictures then, are written; the new result is the file's path.
        batched: Whether an item is a list of them.
    """

    def one(path: str) -> Any:
        return _open(path) if reads else path

    def wrapped(item: Any) -> Any:
        if not batched:
            result = work(one(item))
            return result if folder is None else _save(result, folder, item)
        results = work([one(path) for path in item])
        if folder is None:
            return results
        return [_save(result, folder, path) for result, path in zip(results, item, strict=True)]

    return wrapped


def _open(path: str) -> Any:
    with import_extra("PIL.Image").open(path) as image:
        return image.convert("RGB")


def _save(picture: Any, folder: Path, source: str) -> str:
    """Write a picture, or an array of bytes of (height, width, 3) or (height, width), as PNG."""
    if not hasattr(picture, "save"):
        array = picture.numpy() if hasattr(picture, "numpy") else picture
        picture = import_extra("PIL.Image").fromarray(array)
    name = source if source.endswith(".png") else f"{source}.png"
    path = folder.joinpath(*(part for part in Path(name).parts if part not in {"/", ".."}))
    path.parent.mkdir(parents=True, exist_ok=True)
    # Not by write_atomically, which looks through the folder each time: here it has all results.
    kept = path.with_name(f".{path.name}.kept")
    kept.unlink(missing_ok=True)  # left by a process that was killed, or a link that somebody made
    with showing_system_errors(path), kept.open("xb") as file:
        picture.save(file, format="PNG")
        file.flush()
        os.fsync(file.fileno())
    kept.replace(path)
    sync_folder(path.parent)
    return str(path)
