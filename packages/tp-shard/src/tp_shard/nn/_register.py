"""A layer that marks what goes through it."""

from torch import Tensor, nn

from tp_shard._shards._marks import check_dim
from tp_shard._shards._register import register_parallel_dim

__all__ = ["RegisterParallelDim"]


class RegisterParallelDim(nn.Module):
    """Marks a tensor as split along a dimension, and hands on a view of it.

    Args:
        dim: 1, -1 or 0; ``None`` for a tensor that is whole.

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
        """Return ``input``, marked."""
        # A view: the mark is not meant for those who hold the argument.
        output = input.view_as(input)
        register_parallel_dim(output, self.dim)
        return output

    def extra_repr(self) -> str:
        """Return what the layer was made with."""
        return f"dim={self.dim}"
