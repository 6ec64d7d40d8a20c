"""A linear layer with a weight, and an embedding with a table, that are split over ranks."""

import math
from typing import Self

import torch
from torch import Tensor, nn
from tp_core.arguments import explain_arguments, explain_init
from tp_core.errors import ConfigError

from tp_shard._groups._group import Group, GroupLike, as_group
from tp_shard._shards import ParallelLayer, check_dim
from tp_shard._split import Ranges, Split
from tp_shard.nn._convert import convert_layers, converts_from, without_parameters
from tp_shard.nn._init import init_shard_
from tp_shard.nn.functional import linear, padding_row, parallel_embedding

# -- A linear layer with a weight that is split over ranks ----------------------------------------


@explain_init
@converts_from(nn.Linear)
class ParallelLinear(ParallelLayer, nn.Linear):
    """A ``torch.nn.Linear`` with a weight that is split over the ranks of a group.

    On one rank, and with ``dim=None``, it equals torch's layer. From the same seed it starts with the same
    values. Split outputs (columns) and inputs (rows) follow Megatron-LM (arXiv:1909.08053): one layer with
    ``dim=1`` and one with ``dim=0`` after it need one all-reduce.

    Collectives: with split outputs (``dim`` 1 or -1) none forward, and backward an all-reduce of the input's
    gradient that overlaps the computation of the weight's. With split inputs (``dim=0``) an all-reduce of the
    output forward and none backward. See :func:`functional.parallel_linear` for inputs that have to be
    scattered or joined first. Making a layer broadcasts a generator's state.

    Args:
        in_features: Size of the input's last dimension, over all ranks.
        out_features: Size of the output's last dimension, over all ranks.
        bias: Whether to add a bias; with split inputs it is the same on all ranks.
        dim: 1 or -1 to split the output features, 0 the input features, ``None`` for neither.
        gather_output: Whether to join split outputs; with split inputs the output is whole anyway.
        input_is_parallel: Whether the last dimension of the input is split. By default its width decides.
        device: The device of the parameters.
        dtype: The type of the parameters.
        group: The ranks; the current model-parallel group by default.
        ranges: The pieces of the split dimension that each rank holds, as (start, stop), if the split is not
            even.

    Attributes:
        weight: This rank's shard, of shape (local out, in) or (out, local in).
        bias: The bias, of shape (local out,), or (out,).

    Raises:
        ConfigError: The layer cannot be split like this.

    Example:
        >>> layer = ParallelLinear(20, 30, dim=-1)
        >>> layer(torch.ones(8, 20)).shape  # on one rank
        torch.Size([8, 30])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        dim: int | None = None,
        *,
        gather_output: bool = False,
        input_is_parallel: bool | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        group: GroupLike = None,
        ranges: tuple[tuple[tuple[int, int], ...], ...] | None = None,
    ) -> None:
        if not isinstance(bias, bool) and bias is not None:  # None as torch has it
            msg = f"bias must be True or False, got {bias!r}; the split dimension has a name: dim={bias!r}"
            raise ConfigError(msg)
        nn.Module.__init__(self)  # nn.Linear's own would make the whole weight
        self._describe(
            in_features,
            out_features,
            dim,
            gather_output=gather_output,
            input_is_parallel=input_is_parallel,
            group=group,
            ranges=ranges,
        )
        shape: tuple[int, ...] = (out_features, in_features)
        if "weight" in self.splits:
            shape = self.splits["weight"].local_shape(shape, self.group.rank)
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        if bias:
            self.bias = nn.Parameter(torch.empty(shape[0], device=device, dtype=dtype))
        else:
            self.register_parameter("bias", None)
        self.mark_parameters()
        self.reset_parameters()

    def _describe(
        self,
        in_features: int,
        out_features: int,
        dim: int | None,
        *,
        gather_output: bool,
        input_is_parallel: bool | None = None,
        group: GroupLike,
        ranges: tuple[Ranges, ...] | None = None,
    ) -> None:
        check_dim(dim)
        self.in_features = in_features
        self.out_features = out_features
        self.dim = dim
        self.gather_output = gather_output
        self.input_is_parallel = input_is_parallel
        self.group = as_group(group)
        self.splits = linear_splits(in_features, out_features, dim, self.group, ranges)
        if ranges is not None and self.group.size > 1:
            _check_uneven(self.splits["weight"], dim, gather_output, input_is_parallel)

    def reset_parameters(self) -> None:
        """Draw the initial values of torch's own layer.

        Collectives: broadcasts of a generator's state.
        """
        group, splits = self.group, self.splits
        init_shard_(nn.init.kaiming_uniform_, self.weight, splits.get("weight"), group, {"a": math.sqrt(5)})
        if self.bias is not None:
            if self.in_features > 0:
                bound = 1 / math.sqrt(self.in_features)
            else:
                bound = 0
            init_shard_(nn.init.uniform_, self.bias, splits.get("bias"), group, {"a": -bound, "b": bound})

    def forward(self, input: Tensor) -> Tensor:
        """Return ``input @ weight.T + bias``.

        Args:
            input: The input, of shape (..., in_features), or this rank's shard of it.

        Returns:
            A tensor of shape (..., out_features), or with split outputs this rank's shard of it.

        Raises:
            ConfigError: The input has another width.
        """
        if self._modules:  # parametrizations are children
            self.refuse_norms()
        return linear(input, self.weight, self.bias, self, self.group, self)

    def extra_repr(self) -> str:
        """Return the layer's options."""
        described = (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, dim={self.dim}"
        )
        if self.gather_output:
            described += ", gather_output=True"
        return described

    @classmethod
    @explain_arguments("convert_parallel_linear(model)")
    def convert_parallel_linear(
        cls,
        module: nn.Module,
        dim: int | None = None,
        *,
        gather_output: bool = False,
        group: GroupLike = None,
    ) -> nn.Module:
        """Convert all linear layers of a module to parallel layers with the same values.

        A subclass of ``nn.Linear`` keeps its class if its ``forward`` calls ``super().forward`` for the
        product. Tied and frozen parameters, hooks and the mode are kept. torch's own attention stays whole:
        it reads weights without calling its layers' ``forward``.

        Args:
            module: A linear layer, or a module that contains some and is changed in place. All ranks must
                hold the same values.
            dim: 1 or -1 to split the output features, 0 the input features, ``None`` for neither.
            gather_output: Whether to join split outputs, so that anything can follow.
            group: The ranks; the current model-parallel group by default.

        Returns:
            The module; a new layer if the module is a linear layer itself.

        Raises:
            ModelError: A subclass of ``nn.Linear`` uses its weight in its own ``forward``.
            ConfigError: ``dim`` is another number.
        """
        return convert_layers(module, nn.Linear, dim, gather_output=gather_output, group=as_group(group))

    @classmethod
    def from_plain(cls, linear: nn.Linear, dim: int | None, *, gather_output: bool, group: Group) -> Self:
        """Return a parallel layer with the options of a plain one, without parameters."""
        layer = without_parameters(cls, linear)
        inputs, outputs = linear.in_features, linear.out_features
        layer._describe(inputs, outputs, dim, gather_output=gather_output, group=group)
        return layer


def linear_splits(
    in_features: int,
    out_features: int,
    dim: int | None,
    group: Group,
    ranges: tuple[Ranges, ...] | None,
) -> dict[str, Split]:
    """Return the splits of the weight and the bias of a linear layer.

    Raises:
        ConfigError: There are fewer input features than ranks, or ``ranges`` do not fit.
    """
    if dim is None:
        return {}
    # The weight has shape (out, in).
    axis, size = (1, in_features) if dim == 0 else (0, out_features)
    if ranges is not None:
        if len(ranges) != group.size or any(not 0 <= a <= b <= size for r in ranges for a, b in r):
            msg = f"ranges must be pieces of 0 to {size} for each of {group.size} ranks, got {ranges!r}"
            raise ConfigError(msg)
        split = Split(axis, size, tuple(tuple((a, b) for a, b in r) for r in ranges))
    else:
        split = Split.even(axis, size, group.size)
    if dim == 0:
        if in_features < group.size:
            msg = f"{in_features} input features cannot be split over {group.size} ranks; use dim=-1"
            raise ConfigError(msg)
        return {"weight": split}
    return {"weight": split, "bias": split}


def _check_uneven(split: Split, dim: int | None, gather_output: bool, input_is_parallel: bool | None) -> None:
    if split.is_even:
        return
    if dim == 0 and input_is_parallel is not True:
        msg = "with ranges= the input has to be split already: pass input_is_parallel=True"
        raise ConfigError(msg)
    if dim != 0 and gather_output:
        msg = "outputs that are split by ranges= cannot be joined: leave gather_output out"
        raise ConfigError(msg)


# -- An embedding with a table that is split over ranks -------------------------------------------


@explain_init
@converts_from(nn.Embedding)
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
        self.padding_idx = padding_row(padding_idx, num_embeddings)
        self.max_norm = max_norm
        self.norm_type = norm_type
        self.scale_grad_by_freq = scale_grad_by_freq
        self.sparse = sparse
        self._describe(dim, gather_output=gather_output, group=group)
        shape: tuple[int, ...] = (num_embeddings, embedding_dim)
        if _weight is not None:
            if tuple(_weight.shape) != shape:
                msg = f"the table has shape {shape}, got a _weight of shape {tuple(_weight.shape)}"
                raise ConfigError(msg)
            weight = self.shard(_weight.detach()).to(device, dtype)
        else:
            split = self.splits.get("weight")
            if split is not None:
                shape = split.local_shape(shape, self.group.rank)
            weight = torch.empty(shape, device=device, dtype=dtype)
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
        if dim == 0:
            self.splits = {"weight": Split.even(0, self.num_embeddings, self.group.size)}
        elif dim is not None:
            self.splits = {"weight": Split.even(1, self.embedding_dim, self.group.size)}

    def shard(self, table: Tensor) -> Tensor:
        """Return this rank's part of a whole table, in storage of its own if it is split."""
        split = self.splits.get("weight")
        if split is None or self.group.size == 1:
            return table
        return split.take(table, self.group.rank)

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
        if not start <= self.padding_idx < stop:
            return None
        return self.padding_idx - start

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
        if self.dim is not None:
            described += f", dim={self.dim}"
        if self.dim in (1, -1) and not self.gather_output:
            described += ", gather_output=False"
        return described

    @classmethod
    @explain_arguments("convert_parallel_embedding(model)")
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
        layer = without_parameters(cls, embedding)
        layer._describe(dim, gather_output=gather_output, group=group)
        return layer
