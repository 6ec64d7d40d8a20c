"""What was done to a tensor without memory, so that it can be done again."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tp_core._tensors._nested import mapped

__all__ = ["Operation", "Ref", "listed", "view"]


@dataclass(frozen=True, slots=True)
class Ref:
    """A tensor without memory: a view of one storage."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class Operation:
    """What was done.

    Attributes:
        function: torch's operator.
        args: Its arguments, with references in place of tensors without memory.
        kwargs: Its arguments by name.
        generator_state: That of the random generator before; ``None`` where nothing was drawn.
        made: The storages of its results that are new, in their order, with the places among the results.
        reads: The storages that its result depends on.
        writes: The storage that it changed in place, or ``None``.
        overwrites: Whether nothing is left there of what was before.
    """

    function: Any
    args: Any
    kwargs: Any
    generator_state: Tensor | None
    made: tuple[tuple[int, int], ...]
    reads: frozenset[int]
    writes: int | None
    overwrites: bool

    def replay(self, memory: dict[int, Any]) -> None:
        """Do it again.

        Args:
            memory: The storages that have their values, which those made here come to.
        """

        def real(leaf: Any) -> Any:
            return view(memory, leaf) if isinstance(leaf, Ref) else leaf

        args, kwargs = mapped(real, self.args), mapped(real, self.kwargs)
        state = self.generator_state
        if state is None:
            results = self.function(*args, **kwargs)
        elif kwargs.get("generator") is not None:
            generator = torch.Generator()
            generator.set_state(state)
            results = self.function(*args, **kwargs | {"generator": generator})
        else:
            now = torch.get_rng_state()
            torch.set_rng_state(state)
            try:
                results = self.function(*args, **kwargs)
            finally:
                torch.set_rng_state(now)
        found = listed(results)
        for place, storage in self.made:
            memory[storage] = found[place].untyped_storage()


def listed(results: Any) -> Sequence[Any]:
    """Return the results of an operator as a sequence."""
    return results if isinstance(results, list | tuple) else [results]


def view(memory: dict[int, Any], ref: Ref) -> Tensor:
    """Return the tensor that a reference is to, over the memory of its storage."""
    return torch.empty(0, dtype=ref.dtype).set_(memory[ref.storage], ref.offset, ref.size, ref.stride)
