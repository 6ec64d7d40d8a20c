"""What the conformance tests of a backend start from: which backend, on which devices and ranks."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from tp_core._backend import Backend
from tp_core.testing._ranks import run_ranks

__all__ = ["ConformanceKit"]


class ConformanceKit:
    """A backend under test. Its subclasses hold tests; a subclass of those names the backend.

    Attributes:
        backend: The backend under test.
        devices: The devices of each process.
        processes: How many processes the backend takes; real ones are started.
        options: Options for the backend.
    """

    backend: ClassVar[type[Backend]]
    devices: ClassVar[Iterable[str]] = ("cpu",)
    processes: ClassVar[int] = 1
    options: ClassVar[Mapping[str, Any]] = {}

    @staticmethod
    def make_model() -> nn.Module:
        """Return a model with the same weights on every call; its inputs are (batch, 6)."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()

    @staticmethod
    def make_reference() -> nn.Module:
        """Return the model that computes the same on one device."""
        return ConformanceKit.make_model()

    def everywhere(self, body: Callable[..., Any], *args: Any) -> list[Any]:
        """Run ``body(self, *args)`` on every rank and return what each returned.

        Raises:
            RankFailedError: A rank raised, died or took too long.
        """
        if self.processes == 1:
            return [body(self, *args)]
        return run_ranks(body, self.processes, self, *args)
