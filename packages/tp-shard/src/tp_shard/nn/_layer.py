"""What all layers with split parameters have in common."""

from collections.abc import Callable, Mapping
from typing import Any, Self

from torch import Tensor, nn

from tp_shard._group import Group
from tp_shard._marks import mark_parameter
from tp_shard._split import Split

__all__ = ["ParallelLayer"]


class ParallelLayer(nn.Module):
    """A layer some of whose parameters are shards, and that knows how they were cut.

    The marks on the parameters say it too, for other people's code; they are put back whenever
    torch makes new parameters: after a copy, a pickle, a move to another device, a load.

    Attributes:
        group: The ranks that hold the layer together.
        splits: How each split parameter is cut, by its name; the others are the same on all ranks.
        dim: Along which dimension the layer is split, as its users say it: 1, -1, 0 or ``None``.
        order_type: 0 if weights have shape (out, in), 1 if it is (in, out).
    """

    group: Group
    splits: Mapping[str, Split]
    dim: int | None
    order_type: int = 0

    def mark_parameters(self) -> None:
        """Put the marks on the layer's own parameters."""
        if self.group.size > 1:
            from tp_shard._ddp import teach_ddp

            teach_ddp()
        for name, parameter in self._parameters.items():
            if parameter is None:
                continue
            split = self.splits.get(name)
            mark_parameter(
                parameter,
                None if split is None else self.dim,
                self.order_type,
                split=split,
                sharded=split is not None and self.group.size > 1,
            )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch leaves it so
        self.mark_parameters()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]  # as above
        self.mark_parameters()

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self.mark_parameters()  # assign=True puts other parameters in their place
