"""The contract of a runner's engine: it opens a pool of workers, one per device."""

import abc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self

if TYPE_CHECKING:
    import torch  # listing plugins must not import it

    from tp_core._contracts._backend import Verdict  # no start of workers waits for the backends


class Pool(abc.ABC):
    """A pool of running workers: it takes items, yields results and reports dead workers."""

    @abc.abstractmethod
    def run(self, items: Iterable[Any], *, ordered: bool = True) -> Iterator[Any]:
        """Yield the result of each item, in the order of the items or of completion.

        Items are read lazily, only as far ahead as the workers need. The pool stays usable after the
        iterator is closed early.

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
    """An engine that opens pools of workers in one way: processes, threads, a cluster.

    Attributes:
        name: The name by which users choose this engine.
    """

    name: ClassVar[str]

    @abc.abstractmethod
    def assess(self, devices: "Sequence[torch.device]") -> "Verdict":
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
            worker: The function of each worker, in the runner's own protocol; pass it on unchanged.
            devices: One device for each worker; an entry may occur more than once.
            options: Options of this engine by name.

        Raises:
            tp_core.errors.ConfigError: An option is unknown or has a wrong value.
        """
