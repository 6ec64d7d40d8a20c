"""What the conformance tests of a backend start from: which backend, on which devices and ranks."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from tp_core._contracts._backend import Backend
from tp_core.testing._limits import DeclaredLimits
from tp_core.testing._models import Tail
from tp_core.testing._rank_pool import RankPool
from tp_core.testing._ranks import run_ranks

__all__ = ["ConformanceKit", "PooledKit"]

_pools: dict[type, RankPool] = {}  # here and not on the classes, which are sent to the ranks


class ConformanceKit(DeclaredLimits):
    """A backend under test. Its subclasses hold tests; a subclass of those names the backend.

    Attributes:
        backend: The backend under test.
        devices: The devices of each process.
        processes: How many processes the backend takes; real ones are started.
        options: Options for the backend.
        unused_options: Further options, with which it takes models of which a step does not use every
            parameter.
    """

    backend: ClassVar[type[Backend[Any]]]
    devices: ClassVar[Iterable[str]] = ("cpu",)
    processes: ClassVar[int] = 1
    options: ClassVar[Mapping[str, Any]] = {}
    unused_options: ClassVar[Mapping[str, Any]] = {}

    def subject(self) -> str:
        """Return the name of the backend."""
        return self.backend.name

    @staticmethod
    def make_model() -> nn.Module:
        """Return a model with the same weights on every call; its inputs are (batch, 6).

        It has what backends stumble over: a weight in two places, frozen parameters, one with fewer
        elements than there are ranks, a batch norm with buffers. A backend for models of a kind of its
        own overrides it and returns one that computes the same.
        """
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3), Tail(3)).double()

    @staticmethod
    def make_reference() -> nn.Module:
        """Return the model that computes the same on one device."""
        return ConformanceKit.make_model()

    def everywhere(self, body: Callable[..., Any], *args: Any) -> list[Any]:
        """Run ``body(self, *args)`` on every rank, a new process, and return what each returned.

        Raises:
            RankFailedError: A rank raised, died or took too long.
        """
        if self.processes == 1:
            return [body(self, *args)]
        return run_ranks(body, self.processes, self, *args)


class PooledKit(ConformanceKit):
    """A kit whose tests share their ranks: starting some for each would cost more than the tests."""

    @pytest.fixture(autouse=True)
    def _end_ranks_with_the_class(self, request: pytest.FixtureRequest) -> None:
        owner = request.node.getparent(pytest.Class)
        if type(self) not in _pools and owner is not None:
            owner.addfinalizer(self.end_ranks)

    @classmethod
    def end_ranks(cls) -> None:
        """End the ranks that the tests of this class have shared."""
        pool = _pools.pop(cls, None)
        if pool is not None:
            pool.close()

    def everywhere(self, body: Callable[..., Any], *args: Any) -> list[Any]:
        """Run ``body(self, *args)`` on every rank and return what each returned.

        Raises:
            RankFailedError: A rank raised, died or took too long; the next call gets new ones.
        """
        if self.processes == 1:
            return [body(self, *args)]
        pool = _pools.setdefault(type(self), RankPool(self.processes))
        return pool.run(body, self, *args)
