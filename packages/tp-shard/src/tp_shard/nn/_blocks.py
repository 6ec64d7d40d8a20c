"""Transformer blocks with split layers: attention with shared key heads, and a gated MLP."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tp_shard._groups._group import GroupLike, as_group
from tp_shard.nn._heads import Heads, parallel_attention, section_ranges
from tp_shard.nn._planned import PlannedLinear
from tp_shard.nn._sequence import SequenceState


class ParallelAttention(nn.Module):
    """A self-attention with heads that are split over ranks, and key heads that query heads may share.

    Heads are split as in Megatron-LM (arXiv:1909.08053). Shared key heads are grouped-query attention
    (arXiv:2305.13245). ``sequence`` is Megatron-LM's sequence parallelism (arXiv:2205.05198). Inputs and
    outputs have shape (..., seq, dim), the same on all ranks; with ``sequence`` each rank has its part of
    seq.

    Collectives: an all-reduce forward and one backward. With fewer key heads than ranks one more backward, of
    the gradients of the key and value heads that ranks share. With ``sequence`` an all-gather and a
    reduce-scatter take the place of each all-reduce.

    Args:
        dim: The width of the input and the output.
        heads: The number of query heads, over all ranks.
        kv_heads: The number of key heads; as many by default.
        bias: Whether the projections add a bias.
        causal: Whether a position attends only to itself and earlier ones.
        dropout: The probability, from 0 to 1, with which an attention weight is dropped in training.
        sequence: The sequence lengths of the model, if sequences are split between its layers.
        device: The device of the parameters.
        dtype: The type of the parameters.
        group: The ranks; the current model-parallel group by default.

    Raises:
        ConfigError: The heads cannot be divided over the ranks.

    Example:
        >>> ParallelAttention(16, heads=4, kv_heads=2)(torch.ones(2, 5, 16)).shape
        torch.Size([2, 5, 16])
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        kv_heads: int | None = None,
        *,
        bias: bool = True,
        causal: bool = False,
        dropout: float = 0.0,
        sequence: SequenceState | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        group: GroupLike = None,
    ) -> None:
        super().__init__()
        self.heads, self.kv_heads = heads, heads if kv_heads is None else kv_heads
        self.causal, self.dropout, self.group = causal, dropout, as_group(group)
        divided = Heads(self.heads, self.kv_heads, self.group.size)
        width = dim // heads
        self.qkv = PlannedLinear(
            dim,
            (heads + 2 * self.kv_heads) * width,
            bias,
            -1,
            device=device,
            dtype=dtype,
            group=self.group,
            ranges=divided.ranges(width, "qkv"),
        )
        self.out = PlannedLinear(
            heads * width,
            dim,
            bias,
            0,
            input_is_parallel=True,
            device=device,
            dtype=dtype,
            group=self.group,
            ranges=divided.ranges(width, "q"),
        )
        self.qkv.sequence = self.out.sequence = sequence

    def forward(self, input: Tensor) -> Tensor:
        """Return a tensor like ``input``, of shape (..., seq, dim)."""
        attended = parallel_attention(
            self.qkv(input),
            self.heads,
            self.kv_heads,
            causal=self.causal,
            dropout=self.dropout if self.training else 0.0,
            group=self.group,
        )
        output: Tensor = self.out(attended)
        return output


class ParallelSwiGLU(nn.Module):
    """The gated MLP ``down(silu(gate(x)) * up(x))``, with gate and up in one split layer.

    From Shazeer, "GLU Variants Improve Transformer" (arXiv:2002.05202), split as Megatron-LM's MLP
    (arXiv:1909.08053). Inputs and outputs have shape (..., dim), the same on all ranks. With ``sequence``
    (sequence parallelism, arXiv:2205.05198) each rank has its part of the sequence.

    Collectives: an all-reduce forward and one backward. With ``sequence`` an all-gather and a reduce-scatter
    take the place of each all-reduce.

    Args:
        dim: The width of the input and the output.
        hidden: The width of the hidden layer, over all ranks.
        bias: Whether the layers add a bias.
        sequence: The sequence lengths of the model, if sequences are split between its layers.
        device: The device of the parameters.
        dtype: The type of the parameters.
        group: The ranks; the current model-parallel group by default.

    Example:
        >>> ParallelSwiGLU(8, 12)(torch.ones(3, 8)).shape
        torch.Size([3, 8])
    """

    def __init__(
        self,
        dim: int,
        hidden: int,
        *,
        bias: bool = False,
        sequence: SequenceState | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        group: GroupLike = None,
    ) -> None:
        super().__init__()
        ranks = as_group(group)
        self.gate_up = PlannedLinear(
            dim,
            2 * hidden,
            bias,
            -1,
            device=device,
            dtype=dtype,
            group=ranks,
            ranges=section_ranges(2 * hidden, 2, ranks.size),
        )
        self.down = PlannedLinear(hidden, dim, bias, 0, device=device, dtype=dtype, group=ranks)
        self.gate_up.sequence = self.down.sequence = sequence

    def forward(self, input: Tensor) -> Tensor:
        """Return a tensor like ``input``, of shape (..., dim)."""
        gate, up = self.gate_up(input).chunk(2, dim=-1)
        output: Tensor = self.down(F.silu(gate) * up)
        return output
