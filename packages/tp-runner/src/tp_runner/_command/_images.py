"""Pictures: read from files and written to files by the workers, which decode and encode them."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tp_core.internal import sync_folder

from tp_runner._command._readers import import_extra

__all__ = ["with_images"]


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
    with kept.open("wb") as file:
        picture.save(file, format="PNG")
        file.flush()
        os.fsync(file.fileno())
    kept.replace(path)
    sync_folder(path.parent)
    return str(path)
