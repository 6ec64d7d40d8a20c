"""Class centers that are split over ranks, with their loss."""

import torch
from torch import Tensor, nn
from tp_core.errors import ConfigError

from tp_shard._groups._group import GroupLike, as_group
from tp_shard._shards._layer import ParallelLayer
from tp_shard._split import Split
from tp_shard.nn._loss._margin_functional import parallel_margin_cross_entropy
from tp_shard.nn._loss._margin_head import MarginKind
from tp_shard.nn._loss._reading import check_options, read_chunk_rows
from tp_shard.nn._loss._sampling import check_sample_rate, sample_classes
from tp_shard.nn.init import init_shard_

__all__ = ["MarginCrossEntropy"]


class MarginCrossEntropy(ParallelLayer):
    """A head of class centers and its loss with angular margins, for identities, products or words.

    Features and centers are compared by their cosine; the target's has to be better than the others' by a
    margin. The defaults are ArcFace's (arXiv:1801.07698); ``m2=0, m3=0.4`` is CosFace (arXiv:1801.09414),
    ``m1=1.35, m2=0`` SphereFace (arXiv:1704.08063) with a scale. Centers are split over the ranks of a
    group, and logits exist for a chunk of rows at a time.

    With ``sample_rate`` below 1 a training step computes with the centers of its own classes and a sample of
    the others (Partial FC, arXiv:2010.05222). The sample follows from ``seed`` and the default generator of
    the CPU, from which each step takes one number: ranks that are seeded alike take the same sample however
    many they are, and a resumed run, or a forward pass that is computed again, the one it had. In evaluation
    all centers take part.

    What becomes of the other centers is the optimizer's affair. By default their gradient is 0 and the
    optimizer treats them as any others: momentum and weight decay move them, as in the paper's second version
    (arXiv:2203.15565), and any optimizer goes. With ``sparse=True`` the gradient has no rows for them, which
    saves its memory and the optimizer's time: :func:`tp_shard.update_sampled_rows` lets any element-wise
    optimizer leave those centers and their state untouched, as in the paper's first version.

    Collectives: see :func:`functional.parallel_margin_cross_entropy`. Making one broadcasts a generator's
    state.

    Args:
        in_features: Size of a feature.
        num_classes: Over all ranks; they need not divide it.
        m1: By what the target's angle is multiplied.
        m2: What is added to it then, in radians, from 0 to pi.
        m3: What is subtracted from its cosine.
        scale: By what cosines are multiplied to be logits.
        monotonic: Whether an angle that the margins bring beyond pi goes on to lower the logit.
        label_smoothing: How much of a target is spread over all classes that take part, from 0 to 1.
        ignore_index: Targets that count for nothing.
        reduction: "mean", "sum" or "none".
        sample_rate: The share of the other centers that take part in a training step, above 0 and at most 1.
        seed: Another one for another sequence of samples.
        sparse: Whether the centers' gradient is a sparse tensor of those that took part.
        chunk_rows: How many rows of logits exist at a time; by default as many as give 16 million
            logits, 128 at least.
        device: Where the centers are.
        dtype: Their type.
        group: The ranks; the current model-parallel group by default.

    Attributes:
        weight: This rank's centers, of shape (local classes, in_features), of any length.

    Raises:
        ConfigError: An option is out of its range, or ``sparse`` comes without a sample.

    Example:
        >>> head = MarginCrossEntropy(16, 1000, sample_rate=0.1)
        >>> head(torch.randn(4, 16), torch.tensor([0, 7, 7, 999])).backward()
    """

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        m1: float = 1.0,
        m2: float = 0.5,
        m3: float = 0.0,
        scale: float = 64.0,
        monotonic: bool = True,
        label_smoothing: float = 0.0,
        ignore_index: int = -100,
        reduction: str = "mean",
        sample_rate: float = 1.0,
        seed: int = 0,
        sparse: bool = False,
        chunk_rows: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        group: GroupLike = None,
    ) -> None:
        super().__init__()
        for name, value in [("in_features", in_features), ("num_classes", num_classes)]:
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                msg = f"{name} is a number, 1 or more, got {value!r}"
                raise ConfigError(msg)
        MarginKind(m1, m2, m3, scale, monotonic, sparse)
        check_options(reduction, label_smoothing, 0.0)
        check_sample_rate(sample_rate)
        read_chunk_rows(chunk_rows, 1)
        if sparse and sample_rate == 1:
            msg = "sparse=True is for sampled centers: give a sample_rate below 1, or leave it out"
            raise ConfigError(msg)
        self.in_features, self.num_classes = in_features, num_classes
        self.m1, self.m2, self.m3, self.scale, self.monotonic = m1, m2, m3, scale, monotonic
        self.label_smoothing, self.ignore_index, self.reduction = label_smoothing, ignore_index, reduction
        self.sample_rate, self.seed, self.sparse = sample_rate, seed, sparse
        self.chunk_rows = chunk_rows
        self.group = as_group(group)
        self.dim = -1
        self.splits = {"weight": Split.even(0, num_classes, self.group.size)}
        shape = self.splits["weight"].local_shape((num_classes, in_features), self.group.rank)
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.mark_parameters()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw centers from a normal distribution; their directions are what counts.

        Collectives: broadcasts of a generator's state.
        """
        init_shard_(nn.init.normal_, self.weight, self.splits["weight"], self.group, {"std": 0.01})

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """Return the loss.

        Args:
            input: Features of shape (..., in_features), the same on all ranks.
            target: Classes, of shape (...), the same on all ranks.

        Returns:
            A scalar, or with the reduction "none" a tensor of the target's shape.

        Raises:
            ConfigError: Shapes or types contradict each other.
            OutOfRangeError: A target is none of the classes; on every rank.
            DisagreementError: Ranks have different targets.
        """
        self.refuse_norms()
        sampled = self.draw_sample() if self.training and self.sample_rate < 1 else None
        return parallel_margin_cross_entropy(
            input,
            self.weight,
            target,
            m1=self.m1,
            m2=self.m2,
            m3=self.m3,
            scale=self.scale,
            monotonic=self.monotonic,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
            num_classes=self.num_classes,
            sampled=sampled,
            sparse=self.sparse and sampled is not None,
            chunk_rows=self.chunk_rows,
            group=self.group,
            layer=self,
        )

    def draw_sample(self) -> Tensor:
        """Return the next sample of this rank's classes, as sorted indices into its shard, (sampled,)."""
        drawn = int(torch.randint(2**62, (), dtype=torch.int64, device="cpu"))
        return sample_classes(
            self.num_classes,
            self.sample_rate,
            drawn + self.seed,
            device=self.weight.device,
            group=self.group,
        )

    def extra_repr(self) -> str:
        """Return what the layer was made with."""
        described = (
            f"in_features={self.in_features}, num_classes={self.num_classes}, m1={self.m1}, m2={self.m2}, "
            f"m3={self.m3}, scale={self.scale}"
        )
        if self.sample_rate < 1:
            described += f", sample_rate={self.sample_rate}" + (", sparse=True" if self.sparse else "")
        return described
