"""What samples cost, noted in files: a later epoch or run need not load a sample to plan batches.

A file for each source has a number for each sample, 0 for one that is not known yet. Ranks and runs write at
once without a lock: all of them write the same numbers, and a process that is killed leaves whole ones.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tp_data._order import key_of
from tp_data._sources import Source

_NBYTES = 4


class Costs:
    """The costs of the samples of sources that are known.

    Args:
        folder: The folder of the files. It belongs to one transform and one way to count.
        sources: The sources, by name.
    """

    def __init__(self, folder: str | os.PathLike[str], sources: Mapping[str, Source]) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._noted: list[Any] = []
        for name, source in sources.items():
            path = self.folder / f"{key_of(name, source.digest):016x}.costs"
            with path.open("ab") as file:
                file.truncate(_NBYTES * len(source))  # what is new in it reads as 0
            self._noted.append(np.memmap(path, "<u4", "r+", shape=(len(source),)))

    def find(self, places: Sequence[tuple[int, int]]) -> list[int] | None:
        """Return the costs at places, (source, index) each; ``None`` if one of them is not known."""
        noted = self._noted
        found = [int(noted[number][index]) for number, index in places]
        return [cost - 1 for cost in found] if all(found) else None

    def note(self, places: Sequence[tuple[int, int]], costs: Sequence[int]) -> None:
        """Note the costs at places."""
        for (number, index), cost in zip(places, costs, strict=True):
            self._noted[number][index] = cost + 1
