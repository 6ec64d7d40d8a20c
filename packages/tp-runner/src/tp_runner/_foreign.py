"""A stranger's pool, used as one of our own as far as the contract goes."""

from collections.abc import Callable, Generator, Iterable
from typing import Any

from tp_core.errors import ConfigError

from tp_runner._stream import ResultStream

__all__ = ["ForeignPool"]


class ForeignPool:
    """Adapts a pool that has nothing but ``run`` and ``close``.

    Args:
        pool: The pool of an engine that a plugin brings.
        engine: The name of that engine.
        ordered: Whether results come in the order of the items.
    """

    def __init__(self, pool: Any, engine: str, *, ordered: bool) -> None:
        self._pool = pool
        self._engine = engine
        self._ordered = ordered
        self.closed = False

    def run(self, items: Iterable[Any]) -> ResultStream:
        """Return an iterator over the results."""
        return ResultStream.over(*self.lists(items))

    def lists(self, items: Iterable[Any]) -> tuple[Generator[list[Any], None, None], Callable[[], None]]:
        """Return the results as lists of one, and what ends them."""

        def steps() -> Generator[list[Any], None, None]:
            for result in self._pool.run(items, ordered=self._ordered):
                yield [result]

        generator = steps()
        return generator, generator.close

    def close(self, *, timeout_s: float = 60.0) -> None:
        """End the workers, in whatever time it takes."""
        del timeout_s
        if not self.closed:
            self.closed = True
            self._pool.close()

    def __getattr__(self, name: str) -> Any:
        # What remains is what our own pools have beyond the contract.
        msg = f"engine {self._engine!r} cannot do {name!r}; the engines of tp-runner can"
        raise ConfigError(msg)
