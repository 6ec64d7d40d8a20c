"""What samples cost, noted in files: a later epoch or run need not load a sample to plan batches.

A file for each source has a number for each sample, 0 for one that is not known yet. Ranks and runs write at
once without a lock: all of them write the same numbers, and a process that is killed leaves whole ones.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tp_data._order import Places, groups, key_of
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

    def find(self, places: Places) -> list[int] | None:
        """Return the costs at places; ``None`` if one of them is not known."""
        sources, indices = places
        found = np.empty(len(sources), np.int64)
        for number, at in groups(sources):
            found[at] = self._noted[number][indices[at]]
        return (found - 1).tolist() if found.all() else None

    def note(self, places: Places, costs: Sequence[int]) -> None:
        """Note the costs at places."""
        sources, indices = places
        known = np.asarray(costs)
        for number, at in groups(sources):
            self._noted[number][indices[at]] = known[at] + 1
