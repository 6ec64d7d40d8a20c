"""Cross entropy over class shards, as a module."""

from torch import Tensor, nn
from tp_core.errors import ConfigError

from tp_shard._groups._group import GroupLike
from tp_shard.nn._loss._functional import parallel_cross_entropy
from tp_shard.nn._loss._reading import check_options

__all__ = ["ParallelCrossEntropyLoss"]


class ParallelCrossEntropyLoss(nn.Module):
    """A ``torch.nn.CrossEntropyLoss`` of logits whose classes may be split over ranks.

    Collectives: forward an all-gather of 3 or 4 numbers per row, backward none; none at all for
    logits that are whole. See :func:`functional.parallel_cross_entropy`.

    Args:
        weight: A factor for each class, of shape (num_classes,), on every rank in full.
        ignore_index: Targets that count for nothing.
        reduction: "mean", "sum" or "none".
        label_smoothing: How much of a target is spread over all classes, from 0 to 1.
        num_classes: Over all ranks; logits as wide as this rank's shard are split. Uneven shards need
            it, or a mark that carries it.
        parallel: Whether logits are split. By default ``num_classes`` tells, else their mark.
        class_dim: Which dimension has the classes: 1 or -1; by default the target's shape tells.
        z_loss: This times ``logsumexp(logits) ** 2`` is added to the loss of each row that counts.
        inplace: Whether the logits are overwritten; there is one backward pass then.
        group: Who; the current model-parallel group by default.

    Raises:
        ConfigError: An option has a value that is not listed here.

    Example:
        >>> loss = ParallelCrossEntropyLoss(num_classes=10)
        >>> float(loss(torch.zeros(4, 10), torch.arange(4)))  # on one rank
        2.3025851249694824
    """

    weight: Tensor | None

    def __init__(
        self,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        num_classes: int | None = None,
        *,
        parallel: bool | None = None,
        class_dim: int | None = None,
        z_loss: float = 0.0,
        inplace: bool = False,
        group: GroupLike = None,
    ) -> None:
        super().__init__()
        check_options(reduction, label_smoothing, z_loss)
        if weight is not None and num_classes is not None and weight.shape != (num_classes,):
            msg = (
                f"the weight has a factor for each of {num_classes} classes, got shape {tuple(weight.shape)}"
            )
            raise ConfigError(msg)
        self.register_buffer("weight", weight)
        self.ignore_index = ignore_index
        self.reduction = reduction
        self.label_smoothing = label_smoothing
        self.num_classes = num_classes
        self.parallel = parallel
        self.class_dim = class_dim
        self.z_loss = z_loss
        self.inplace = inplace
        self.group = group

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """Return the loss.

        Args:
            input: Logits of shape (..., classes) or (batch, classes, d1, ...), whole or this rank's
                shard of the classes.
            target: Classes, of the shape of ``input`` without its classes, the same on all ranks.

        Returns:
            A scalar, or with the reduction "none" a tensor of the target's shape.

        Raises:
            ConfigError: Shapes, options and marks contradict each other.
            OutOfRangeError: A target is none of the classes; on every rank.
            DisagreementError: Ranks have different targets or count different numbers of classes.
        """
        return parallel_cross_entropy(
            input,
            target,
            self.weight,
            self.ignore_index,
            self.reduction,
            self.label_smoothing,
            num_classes=self.num_classes,
            parallel=self.parallel,
            class_dim=self.class_dim,
            z_loss=self.z_loss,
            inplace=self.inplace,
            group=self.group,
            layer=self,
        )

    def extra_repr(self) -> str:
        """Return what the loss was made with."""
        return (
            f"num_classes={self.num_classes}, reduction={self.reduction!r}, "
            f"ignore_index={self.ignore_index}, label_smoothing={self.label_smoothing}"
        )
