"""The measurements of an epoch: its seconds, and what its loader measured."""

import time

import torch
from tp_core.data import PreparedLoader
from tp_core.plugins import Session


class EpochTimer:
    """Measures the current epoch.

    Args:
        session: The session of the run.
        train: The prepared training loader.
    """

    def __init__(self, session: Session, train: PreparedLoader) -> None:
        self._session = session
        self._train = train
        self._began = time.perf_counter()  # with the epoch, if all of it had been here
        self._began_here = self._began
        self._sums_before: dict[str, float] = {}

    def begin(self, seconds_before: float) -> None:
        """Begin an epoch, of which ``seconds_before`` passed before a resume."""
        self._began_here = time.perf_counter()
        self._began = self._began_here - seconds_before
        self._sums_before = self._train.measured()

    @property
    def seconds(self) -> float:
        """The seconds of the epoch so far, those before a resume included."""
        return time.perf_counter() - self._began

    def measured(self) -> dict[str, float]:
        """Return what the loader measured of this rank's batches since the epoch began here."""
        before = self._sums_before
        return {name: value - before.get(name, 0.0) for name, value in self._train.measured().items()}

    def measured_everywhere(self) -> dict[str, float]:
        """Return what the loader measured since the epoch began here, over all data ranks.

        Collectives: one gather of objects and one all-reduce, for a loader that measures.
        """
        session = self._session
        own = self.measured()
        if not own:
            return {}
        seconds = time.perf_counter() - self._began_here
        # A rank without a sample so far may lack names.
        everyones = session.gather_objects(sorted(own), where="names of times")
        names = sorted({name for theirs in everyones for name in theirs})
        sums = [own.get(name, 0.0) for name in names]
        totals = session.reduce(torch.tensor(sums, dtype=torch.float64))
        results = dict(zip(names, totals.tolist(), strict=True))
        if "wait_s" in results:
            results["wait_s"] /= session.data_size
        if results.get("padded_tokens"):
            results["fill"] = results["tokens"] / results["padded_tokens"]
            results["tokens_per_s"] = results["tokens"] / seconds
        return results
