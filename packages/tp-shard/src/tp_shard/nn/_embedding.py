"""An embedding with a table that is split over ranks."""

from typing import Self

import torch
from torch import Tensor, nn
from tp_core.errors import ConfigError

from tp_shard._groups._group import Group, GroupLike, as_group
from tp_shard._shards._attributes import check_dim
from tp_shard._shards._layer import ParallelLayer
from tp_shard._split import Split
from tp_shard.nn._convert import convert_layers
from tp_shard.nn._kinds import stands_for
from tp_shard.nn.functional import parallel_embedding
from tp_shard.nn.init import init_shard_


@stands_for(nn.Embedding)
class ParallelEmbedding(ParallelLayer, nn.Embedding):
    """A ``torch.nn.Embedding`` with a table that is split over the ranks of a group.

    On one rank, and with ``dim=None``, it equals torch's layer. From the same seed it starts with the same
    values. Split rows are Megatron-LM's embedding (arXiv:1909.08053).

    Collectives: with split rows (``dim=0``) an all-reduce of the output forward and none backward. With split
    features (``dim`` 1 or -1) an all-gather of the output forward and none backward, or none at all with
    ``gather_output=False``. Making a layer broadcasts a generator's state.

    Args:
        num_embeddings: Rows of the table, over all ranks.
        embedding_dim: Features of a row, over all ranks.
        padding_idx: The row, of the whole table, that starts at zero and gets no gradient.
        max_norm: The largest norm of a row; longer rows are scaled to it when they are looked up.
        norm_type: The order of that norm.
        scale_grad_by_freq: Whether to divide a row's gradient by the number of times it is looked up.
        sparse: Whether the weight's gradient is sparse.
        _weight: The initial values of the whole table, of shape (num_embeddings, embedding_dim).
        _freeze: Whether to exclude the table from training.
        dim: 0 to split the rows, 1 or -1 the features, ``None`` for neither.
        gather_output: Whether to join split features, as torchshard does.
        device: The device of the table.
        dtype: The type of the table.
        group: The ranks; the current model-parallel group by default.

    Attributes:
        weight: This rank's shard, of shape (local rows, features) or (rows, local features).

    Raises:
        ConfigError: ``padding_idx`` is not a row of the table, or ``_weight`` has another shape.

    Example:
        >>> table = ParallelEmbedding(64, 512, dim=0)
        >>> table(torch.tensor([[1, 63]])).shape
        torch.Size([1, 2, 512])
    """

    order_type = 1

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        _weight: Tensor | None = None,
        _freeze: bool = False,
        dim: int | None = None,
        *,
        gather_output: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        group: GroupLike = None,
    ) -> None:
        nn.Module.__init__(self)  # nn.Embedding's own would make the whole table
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        if padding_idx is not None:
            if not -num_embeddings <= padding_idx < num_embeddings:
                msg = f"padding_idx must be one of the {num_embeddings} rows, got {padding_idx}"
                raise ConfigError(msg)
            padding_idx %= num_embeddings
        self.padding_idx = padding_idx
        self.max_norm = max_norm
        self.norm_type = norm_type
        self.scale_grad_by_freq = scale_grad_by_freq
        self.sparse = sparse
        self._describe(dim, gather_output=gather_output, group=group)
        shape = (num_embeddings, embedding_dim)
        if _weight is not None:
            if tuple(_weight.shape) != shape:
                msg = f"the table has shape {shape}, got a _weight of shape {tuple(_weight.shape)}"
                raise ConfigError(msg)
            weight = self.shard(_weight.detach()).to(device, dtype)
        else:
            split = self.splits.get("weight")
            local = shape if split is None else split.local_shape(shape, self.group.rank)
            weight = torch.empty(local, device=device, dtype=dtype)
        self.weight = nn.Parameter(weight, requires_grad=not _freeze)
        self.mark_parameters()
        if _weight is None:
            self.reset_parameters()

    def _describe(self, dim: int | None, *, gather_output: bool, group: GroupLike) -> None:
        check_dim(dim)
        self.dim = dim
        self.gather_output = gather_output
        self.group = as_group(group)
        self.splits = {}
        if dim is not None:
            size = self.num_embeddings if dim == 0 else self.embedding_dim
            self.splits = {"weight": Split.even(0 if dim == 0 else 1, size, self.group.size)}

    def shard(self, table: Tensor) -> Tensor:
        """Return this rank's part of a whole table, in storage of its own if it is split."""
        split = self.splits.get("weight")
        return table if split is None or self.group.size == 1 else split.take(table, self.group.rank)

    def reset_parameters(self) -> None:
        """Draw the initial values of torch's own layer.

        Collectives: broadcasts of a generator's state.
        """
        init_shard_(nn.init.normal_, self.weight, self.splits.get("weight"), self.group, {})
        row = self._local_padding_idx()
        if row is not None and not self.weight.is_meta:
            with torch.no_grad():
                self.weight[row].fill_(0)

    def _local_padding_idx(self) -> int | None:
        """Return the index of the padding row among this rank's rows, ``None`` if another rank has it."""
        split = self.splits.get("weight")
        if self.padding_idx is None or split is None or split.dim != 0:
            return self.padding_idx
        ((start, stop),) = split.ranges[self.group.rank]
        return self.padding_idx - start if start <= self.padding_idx < stop else None

    def forward(self, input: Tensor) -> Tensor:
        """Return the rows of ``input``.

        Args:
            input: Tokens of any shape, the same on all ranks.

        Returns:
            A tensor of shape (..., embedding_dim), the tokens' dimensions first, or with
            ``gather_output=False`` and split features this rank's shard of it.

        Raises:
            OutOfRangeError: A token is not in the table; on every rank, before anything is sent.
        """
        self.refuse_norms()
        return parallel_embedding(
            input,
            self.weight,
            self.padding_idx,
            self.max_norm,
            self.norm_type,
            self.scale_grad_by_freq,
            self.sparse,
            self.num_embeddings,
            self.dim,
            embedding_dim=self.embedding_dim,
            gather_output=self.gather_output,
            group=self.group,
            layer=self,
        )

    def extra_repr(self) -> str:
        """Return the layer's options."""
        described = super().extra_repr()
        described += "" if self.dim is None else f", dim={self.dim}"
        return described + ("" if self.gather_output or self.dim in (None, 0) else ", gather_output=False")

    @classmethod
    def convert_parallel_embedding(
        cls,
        module: nn.Module,
        dim: int | None = None,
        *,
        gather_output: bool = True,
        group: GroupLike = None,
    ) -> nn.Module:
        """Convert all embeddings of a module to parallel embeddings with the same values.

        Options, tied and frozen parameters, hooks and the mode are kept.

        Args:
            module: An embedding, or a module that contains some and is changed in place. All ranks must hold
                the same values.
            dim: 0 to split the rows, 1 or -1 the features, ``None`` for neither.
            gather_output: Whether to join split features, so that anything can follow.
            group: The ranks; the current model-parallel group by default.

        Returns:
            The module; a new layer if the module is an embedding itself.

        Raises:
            ModelError: A subclass of ``nn.Embedding`` uses its weight in its own ``forward``.
            ConfigError: ``dim`` is another number.
        """
        return convert_layers(module, nn.Embedding, dim, gather_output=gather_output, group=as_group(group))

    @classmethod
    def from_plain(
        cls, embedding: nn.Embedding, dim: int | None, *, gather_output: bool, group: Group
    ) -> Self:
        """Return a parallel embedding with the options of a plain one, without a table."""
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer.__dict__.update({k: v for k, v in embedding.__dict__.items() if k not in ("_parameters",)})
        layer._describe(dim, gather_output=gather_output, group=group)
        return layer
