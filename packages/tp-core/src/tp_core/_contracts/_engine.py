"""The contract of what a runner runs on: a pool of workers, one per device."""

import abc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self

from tp_core._contracts._backend import Verdict

if TYPE_CHECKING:  # listing plugins must not import torch
    import torch


class Pool(abc.ABC):
    """Workers that are running: takes items, yields results, reports deaths, closes."""

    @abc.abstractmethod
    def run(self, items: Iterable[Any], *, ordered: bool = True) -> Iterator[Any]:
        """Yield the result of each item, in the order of the items or as they come.

        Items are read lazily, and only so far ahead as the workers need. Closing the iterator
        early leaves the pool usable.

        Raises:
            tp_core.errors.TpError: A worker raised or died; the message names the item.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """End the workers; calling it again does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Engine(abc.ABC):
    """Opens pools of workers in one particular way: processes, threads, a cluster.

    Attributes:
        name: What users write to ask for this engine.
    """

    name: ClassVar[str]

    @abc.abstractmethod
    def assess(self, devices: "Sequence[torch.device]") -> Verdict:
        """Return whether workers on these devices can be run here; cheap and without side effects."""

    @abc.abstractmethod
    def open(
        self,
        worker: Callable[..., Any],
        devices: "Sequence[torch.device]",
        *,
        options: Mapping[str, Any],
    ) -> Pool:
        """Start one worker per device.

        Args:
            worker: What each worker runs; the runner's own protocol, given to ``Pool`` as it is.
            devices: One device for each worker; an entry may occur more than once.
            options: Options of this engine by name.

        Raises:
            tp_core.errors.ConfigError: An option is unknown or has a wrong value.
        """
