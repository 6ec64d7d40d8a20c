"""Layers without parameters: dropout of what is split, and a mark on what goes through."""

from torch import Tensor, nn

from tp_shard._groups._random import RandomTracker
from tp_shard._shards._marks import check_dim
from tp_shard._shards._register import register_parallel_dim

__all__ = ["ParallelDropout", "RegisterParallelDim"]


class RegisterParallelDim(nn.Module):
    """Marks a tensor as split along a dimension, and hands on a view of it.

    Args:
        dim: 1 or -1 where output features are split, 0 where input features are; ``None`` for a tensor
            that is whole.

    Raises:
        ConfigError: ``dim`` is another number.

    Example:
        >>> marked = RegisterParallelDim(0)(torch.empty(3))
        >>> get_parallel_dim(marked)
        0
    """

    def __init__(self, dim: int | None = None) -> None:
        super().__init__()
        check_dim(dim)
        self.dim = dim

    def forward(self, input: Tensor) -> Tensor:
        """Return a view of ``input``, of any shape, with the mark."""
        # A view: the mark is not meant for those who hold the argument.
        output = input.view_as(input)
        register_parallel_dim(output, self.dim)
        return output

    def extra_repr(self) -> str:
        """Return what the layer was made with."""
        return f"dim={self.dim}"


class ParallelDropout(nn.Dropout):
    """Dropout of what is split over ranks: each of them draws its own mask.

    Args:
        p: The probability, from 0 to 1, with which an element is dropped.
        inplace: Whether the input is overwritten.
        tracker: The rank's own random numbers; layers of one model share one.

    Under ``torch.utils.checkpoint`` masks are drawn alike the second time: they follow torch's generator.

    Collectives: none.

    Example:
        >>> drop = ParallelDropout(0.5, tracker=ts.RandomTracker(1))
        >>> drop(torch.ones(4)).shape
        torch.Size([4])
    """

    def __init__(self, p: float = 0.5, inplace: bool = False, *, tracker: RandomTracker) -> None:
        super().__init__(p, inplace)
        self.tracker = tracker

    def forward(self, input: Tensor) -> Tensor:
        """Return this rank's shard, of any shape; in training some elements are 0, the others scaled."""
        if not self.training or self.p == 0:
            return input
        with self.tracker.fork(input.device):
            return super().forward(input)
