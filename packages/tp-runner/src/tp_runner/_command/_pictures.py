"""The pictures of ``tp run``: files that a runner gets as pictures, and pictures that it returns."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tp_core.errors import ConfigError
from tp_core.files import showing_system_errors, sync_folder

from tp_runner._command._records import import_extra


def with_images(
    work: Callable[[Any], Any], *, reads: bool, folder: Path | None, batched: bool
) -> Callable[[Any], Any]:
    """Wrap work on pictures as work on the paths of their files.

    Args:
        work: The function of an item, or of a batch.
        reads: Whether it gets pictures, as ``PIL.Image`` in RGB, instead of paths.
        folder: Where to write results, which are pictures then; the new result is the file's path.
        batched: Whether an item is a list of paths.
    """

    def opened(path: str) -> Any:
        if reads:
            return _open(path)
        return path

    def saved(result: Any, path: str) -> Any:
        if folder is None:
            return result
        return _save(result, folder, path)

    def on_item(path: str) -> Any:
        return saved(work(opened(path)), path)

    def on_batch(paths: list[str]) -> Any:
        results = work([opened(path) for path in paths])
        if folder is None:
            return results
        return [saved(result, path) for result, path in zip(results, paths, strict=True)]

    if batched:
        return on_batch
    return on_item


def _open(path: str) -> Any:
    with import_extra("PIL.Image").open(path) as image:
        return image.convert("RGB")


def check_unique_picture(source: str, folder: Path, taken: dict[Path, str]) -> None:
    """Refuse a source if another source's picture is saved to the same file, and would be lost."""
    path = _picture_of(source, folder)
    other = taken.setdefault(path, source)
    if other != source and os.path.realpath(other) != os.path.realpath(source):
        msg = (
            f"the pictures of {other} and {source} would both be saved as {path}; rename one of the files, "
            "or give it to a run with another folder as --output"
        )
        raise ConfigError(msg)


def _picture_of(source: str, folder: Path) -> Path:
    name = source if source.endswith(".png") else f"{source}.png"
    return folder.joinpath(*(part for part in Path(name).parts if part not in {"/", ".."}))


def _save(picture: Any, folder: Path, source: str) -> str:
    """Write a picture, or an array of bytes of (height, width, 3) or (height, width), as PNG."""
    if not hasattr(picture, "save"):
        if hasattr(picture, "numpy"):
            picture = picture.numpy()
        picture = import_extra("PIL.Image").fromarray(picture)
    path = _picture_of(source, folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Not by write_atomically, which lists the folder each time: here the folder has all results.
    unfinished = path.with_name(f".{path.name}.kept")
    unfinished.unlink(missing_ok=True)  # left by a killed process, or a link that somebody made
    with showing_system_errors(path), unfinished.open("xb") as file:
        picture.save(file, format="PNG")
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)
    sync_folder(path.parent)
    return str(path)
