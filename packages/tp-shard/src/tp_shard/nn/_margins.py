"""Class centers that are split over ranks, and their loss with margins."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tp_core.arguments import explain_init
from tp_core.errors import ConfigError

from tp_shard._groups._collectives import gather_sizes
from tp_shard._groups._group import GroupLike, as_group
from tp_shard._shards import ParallelLayer
from tp_shard._split import Split, bounds
from tp_shard.nn._class_shards import LossOptions, TargetRows, block_rows, computed_in
from tp_shard.nn._cross_entropy import (
    check_class_indices,
    check_head,
    check_options,
    read_chunk_rows,
    read_options,
)
from tp_shard.nn._fused_loss import Products, fused_cross_entropy
from tp_shard.nn._init import init_shard_

# -- Samples of class centers ---------------------------------------------------------------------
# Partial FC (An et al., "Partial FC: Training 10 Million Identities on a Single Machine",
# arXiv:2010.05222, and "Killing Two Birds with One Stone", arXiv:2203.15565): a step uses the centers of the
# batch's own classes and a new sample of the others.


_BLOCK = 1 << 16  # classes per seed; another number would draw other samples, also in resumed runs
_SEEDS = 2**63  # seeds stay below it, in the range of `manual_seed`


def sample_classes(
    num_classes: int,
    rate: float,
    seed: int,
    *,
    device: torch.device | str | None = None,
    group: GroupLike = None,
) -> Tensor:
    """Return the indices of this rank's classes that are in a sample of all classes.

    For Partial FC (arXiv:2010.05222): a step of a margin loss takes these classes and its targets' own. Each
    class is in the sample with probability ``rate``, independently, so the number of classes varies a little.

    The sample depends on ``rate``, ``seed`` and ``num_classes`` alone. It is the same on any number of ranks
    and on any device. A rank draws numbers only for the blocks of classes that contain its own.

    Args:
        num_classes: The number of classes over all ranks.
        rate: The probability of a class, above 0 and at most 1.
        seed: A seed, another one for each step.
        device: The device of the result; the CPU by default, where the numbers are drawn anyway.
        group: The ranks that hold the classes; the current model-parallel group by default.

    Returns:
        Indices into this rank's shard, sorted, of shape (classes in the sample,).

    Raises:
        ConfigError: ``rate`` is not above 0 and at most 1.

    Example:
        >>> sample_classes(10, 0.5, seed=1)  # on one rank
        tensor([0, 1, 5, 6, 7, 9])
    """
    check_sample_rate(rate)
    ranks = as_group(group)
    start, stop = bounds(num_classes, ranks.size, ranks.rank)
    masks = []
    first_block = start // _BLOCK
    last_block = -(-stop // _BLOCK) if stop > start else first_block
    for block in range(first_block, last_block):
        # Two large odd factors keep neighboring seeds and blocks apart. A plain sum would give block 1 of one
        # step the numbers of block 0 of the next.
        mixed = (seed * 0x9E3779B97F4A7C15 + (block + 1) * 0xBF58476D1CE4E5B9) % _SEEDS
        first = block * _BLOCK
        mask = torch.rand(_BLOCK, generator=torch.Generator().manual_seed(mixed)) < rate
        masks.append(mask[max(start - first, 0) : stop - first])
    if not masks:  # a rank without classes
        return torch.zeros(0, dtype=torch.int64, device=device)
    return torch.cat(masks).nonzero().squeeze(1).to(device)


def check_sample_rate(rate: float) -> None:
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 < rate <= 1:
        msg = f"sample_rate is the share of classes that take part, above 0 and at most 1, got {rate!r}"
        raise ConfigError(msg)


def with_sample(options: LossOptions, sampled: Tensor, target: Tensor) -> LossOptions:
    """Return options for a sample and the targets' own classes.

    Raises:
        ConfigError: ``sampled`` are not indices into this rank's shard.

    Collectives: with label smoothing an all-gather of a number.
    """
    start, stop = options.bounds
    if sampled.dim() != 1 or sampled.dtype not in (torch.int64, torch.int32):
        msg = (
            f"sampled are classes of this rank, as a vector of integers; got {sampled.dtype} of shape "
            f"{tuple(sampled.shape)}"
        )
        raise ConfigError(msg)
    # Reading values would wait for an accelerator; there the index operation itself asserts.
    if sampled.numel() and sampled.device.type == "cpu":
        low = int(sampled.min())
        high = int(sampled.max())
        if low < 0 or high >= stop - start:
            msg = (
                f"sampled are indices into this rank's {stop - start} classes, 0 to {stop - start - 1}; got "
                f"{low} to {high}"
            )
            raise ConfigError(msg)
    mask = torch.zeros(stop - start, dtype=torch.bool, device=target.device)
    mask[sampled.to(target.device)] = True
    is_local = (target != options.ignore_index) & (target >= start) & (target < stop)
    mask[target[is_local] - start] = True
    with_targets = mask.nonzero().squeeze(1)
    num_sampled = 0
    if options.label_smoothing > 0:
        num_sampled = with_targets.numel()
        if options.group.size > 1:
            num_sampled = sum(gather_sizes(num_sampled, options.group, target.device))
    return replace(options, sampled=with_targets, num_sampled=num_sampled)


# -- The margin head: cosines of features and class centers, with a margin at the targets ---------
# The formula of ArcFace (Deng et al., arXiv:1801.07698), which includes the margins of CosFace (Wang et al.,
# arXiv:1801.09414) and SphereFace (Liu et al., arXiv:1704.08063).


_TINY = 1e-12  # the least norm to divide by, as in torch.nn.functional.normalize


@dataclass(frozen=True, slots=True)
class Margins:
    """The margins of a head.

    Attributes:
        m1: The factor of the angle between a feature and its center.
        m2: The angle that is added then, in radians.
        m3: The number that is subtracted from the cosine.
        scale: The factor from cosines to logits.
        monotonic: Whether the cosine continues to fall beyond pi, as in SphereFace, or rises again.
    """

    m1: float
    m2: float
    m3: float
    scale: float
    monotonic: bool

    def __post_init__(self) -> None:
        for name, value in (("m1", self.m1), ("scale", self.scale)):
            if not 0 < value < math.inf:
                msg = f"{name} is a finite factor above 0, got {value!r}"
                raise ConfigError(msg)
        if not 0 <= self.m2 <= math.pi:
            msg = f"m2 is an angle in radians, from 0 to pi, got {self.m2!r}"
            raise ConfigError(msg)
        if not 0 <= self.m3 < math.inf:
            msg = f"m3 is subtracted from a cosine and is 0 or more, got {self.m3!r}"
            raise ConfigError(msg)

    def apply(self, cosine: Tensor) -> tuple[Tensor, Tensor]:
        """Return the cosines of the targets with margins, and the derivative with respect to the cosines."""
        if self.m1 == 1 and self.m2 == 0:
            return cosine - self.m3, torch.ones_like(cosine)
        angle = cosine.acos().mul_(self.m1).add_(self.m2)
        value = angle.cos()
        slope = angle.sin()
        if self.monotonic:
            # SphereFace's psi: each half turn mirrors the cosine and lowers it by 2, so that it falls on.
            turns = (angle / math.pi).floor_()
            sign = 1 - 2 * turns.remainder(2)
            value = value * sign - 2 * turns
            slope = slope * sign
        # The slope is infinite where feature and center coincide: without the least sine its gradient would
        # be NaN (`a_feature_on_or_opposite_of_its_center_has_finite_gradients`).
        sine = ((1 - cosine) * (1 + cosine)).clamp_min_(torch.finfo(cosine.dtype).eps).sqrt_()
        return value - self.m3, slope * self.m1 / sine


class MarginHead:
    """A margin head: scaled cosines of features, as unit vectors (rows, in), and centers of any norm.

    Centers are normalized only if they have to be copied anyway: sampled ones are gathered, and for a half
    type all of them are cast. Otherwise they are multiplied as they are, and the logits' columns are divided
    by their norms.
    """

    def __init__(
        self,
        margins: Margins,
        x: Tensor,
        weight: Tensor,
        _bias: Tensor | None,
        options: LossOptions,
        needed: tuple[bool, ...],
    ) -> None:
        self._margins = margins
        self._x = x
        self._weight = weight
        self._sampled = options.sampled
        self._dtype = computed_in(weight.dtype)
        self._n_centers = weight.size(0)
        if self._sampled is not None:
            self._n_centers = self._sampled.numel()
        self._is_copied = self._sampled is not None or x.dtype != self._dtype
        # What the features are multiplied by, (centers, in), and 1 / norm of each center.
        self._factors = weight
        if self._is_copied:
            self._factors = torch.empty(self._n_centers, weight.size(1), dtype=x.dtype, device=weight.device)
        self._inverse_norms = torch.empty(self._n_centers, dtype=self._dtype, device=weight.device)
        for a, b in self._blocks():
            block = self._centers(a, b)
            inverse = torch.linalg.vector_norm(block, dim=1).clamp_min_(_TINY).reciprocal_()
            self._inverse_norms[a:b] = inverse
            if self._is_copied:
                self._factors[a:b] = block * inverse.unsqueeze(1)
        # From products to logits, for each column.
        self._columns: Tensor | float = margins.scale
        if not self._is_copied:
            self._columns = self._inverse_norms * margins.scale
        self._products = Products(x, self._factors, options, needed)
        # The derivative of each row's target logit by its cosine, for the backward pass.
        self._slope = torch.ones(x.size(0), dtype=self._dtype, device=x.device)

    def logits(self, start: int, stop: int, rows: TargetRows) -> Tensor:
        """Return the scaled cosines of some rows, with their margins, in the type of the computation."""
        logits = self._x[start:stop].mm(self._factors.t()).to(self._dtype).mul_(self._columns)
        if self._n_centers:
            # A rank without the target has index 0 for it, and writes back what stands there.
            scale = self._margins.scale
            index = rows.index.unsqueeze(1)  # (rows, 1)
            old = logits.gather(1, index).squeeze(1)
            new, slope = self._margins.apply((old / scale).clamp_(-1, 1))
            self._slope[start:stop] = torch.where(rows.is_local, slope, 1)
            logits.scatter_(1, index, torch.where(rows.is_local, new * scale, old).unsqueeze(1))
        return logits

    def add(self, grad: Tensor, start: int, stop: int, rows: TargetRows) -> None:
        """Add the gradients from the gradient of some rows' logits, which is overwritten.

        Collectives: starts an all-reduce of the features' gradient.
        """
        if self._n_centers:
            index = rows.index.unsqueeze(1)
            grad.scatter_(1, index, grad.gather(1, index) * self._slope[start:stop].unsqueeze(1))
        self._products.add(grad.mul_(self._columns).to(self._x.dtype), start, stop)

    def gradients(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the gradients of the unit vectors and of the centers that have logits."""
        grad_x, grad = self._products.wait()
        if grad is not None:
            # A center's length changes no cosine: remove the component along it.
            for a, b in self._blocks():
                block = grad[a:b]
                inverse = self._inverse_norms[a:b].unsqueeze(1)
                unit = self._centers(a, b) * inverse
                block.addcmul_(unit, (unit * block).sum(1, keepdim=True), value=-1)
                if self._is_copied:
                    block.mul_(inverse)
        return grad_x, grad, None

    def _blocks(self) -> Iterator[tuple[int, int]]:
        step = block_rows(self._weight.size(1), self._weight.device)
        for a in range(0, self._n_centers, step):
            yield a, min(self._n_centers, a + step)

    def _centers(self, start: int, stop: int) -> Tensor:
        """Return some of the centers with logits, in the type of the computation."""
        if self._sampled is None:
            return self._weight[start:stop].to(self._dtype)
        return self._weight.index_select(0, self._sampled[start:stop]).to(self._dtype)


def parallel_margin_cross_entropy(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    m1: float = 1.0,
    m2: float = 0.5,
    m3: float = 0.0,
    scale: float = 64.0,
    monotonic: bool = True,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    num_classes: int | None = None,
    sampled: Tensor | None = None,
    sparse: bool = False,
    chunk_rows: int | None = None,
    group: GroupLike = None,
    layer: nn.Module | str | None = None,
) -> Tensor:
    """Return the cross entropy of cosines of features and class centers, with a margin at the targets.

    The logit of a class is ``scale * cos(angle)`` between feature and center, whatever their lengths. The
    logit of the target is ``scale * (cos(m1 * angle + m2) - m3)``. ``m2`` alone is ArcFace
    (arXiv:1801.07698), ``m3`` alone CosFace (arXiv:1801.09414), ``m1`` alone SphereFace (arXiv:1704.08063)
    with a scale. No rank ever has the logits of all classes. This rank's logits are in memory for a chunk of
    rows at a time.

    Collectives: forward for each chunk an all-gather of 3 or 4 numbers per row, and an all-reduce of the
    features' gradient that overlaps the next products; backward none. With reduction "none", and for float16,
    where a loss scale has to reach small gradients: forward one all-gather, backward the all-reduces. With
    ``sampled`` and label smoothing one more all-gather forward, of a number.

    Args:
        input: Features of shape (..., in), the same on all ranks.
        weight: This rank's shard of the class centers, of shape (local classes, in).
        target: Classes, of shape (...), the same on all ranks.
        m1: The factor of the target's angle.
        m2: The angle that is added then, in radians, from 0 to pi.
        m3: The number that is subtracted from the cosine.
        scale: The factor from cosines to logits.
        monotonic: Whether an angle beyond pi continues to lower the logit, as in SphereFace; otherwise its
            cosine rises again.
        ignore_index: The target of rows that do not count.
        reduction: "mean", "sum" or "none".
        label_smoothing: The part of a target that is spread over all classes that take part, from 0 to 1.
        num_classes: The number of classes over all ranks. By default it comes from the weight's mark; without
            a mark the ranks' shards have the same size.
        sampled: The classes of this rank that take part, as indices into its shard (:func:`sample_classes`
            draws some); the targets' classes always do. ``None`` for all.
        sparse: Whether the centers' gradient is a sparse tensor of those that took part.
        chunk_rows: The number of rows of logits in memory at a time; by default as many as give 16 million
            logits, 128 at least.
        group: The ranks; the current model-parallel group by default.
        layer: The module that communicates, or a name for it, for messages.

    Returns:
        A scalar, or with "none" a tensor of the target's shape; under autocast a float32.

    Raises:
        ConfigError: Shapes, types and options contradict each other.
        OutOfRangeError: A target is none of the classes; on every rank.
        DisagreementError: Ranks differ in targets or numbers of classes; checked on the CPU alone.
        RuntimeError: A second backward pass where the gradients are computed in the forward pass.

    Example:
        >>> features, centers = torch.randn(4, 16), torch.randn(10, 16)
        >>> loss = parallel_margin_cross_entropy(features, centers, torch.arange(4), m2=0.0, m3=0.35)
    """
    margins = Margins(m1, m2, m3, scale, monotonic)
    check_options(reduction, label_smoothing, 0.0)
    check_class_indices(target)
    ranks = as_group(group)
    size = check_head(input, weight, target, num_classes, ranks)
    if sparse and sampled is None:
        msg = "sparse=True is for the gradient of sampled centers, and all of them take part: leave it out"
        raise ConfigError(msg)
    options = LossOptions(size, None, ignore_index, label_smoothing, reduction, 0.0, ranks, layer)
    options = read_options(options, input)
    flat = target.reshape(-1).long()
    if sampled is not None:
        options = replace(with_sample(options, sampled, flat), is_sparse=sparse)
    n_centers = weight.size(0)
    if options.sampled is not None:
        n_centers = options.sampled.numel()
    chunk_rows = read_chunk_rows(chunk_rows, n_centers)
    x = input.reshape(-1, input.size(-1))  # (rows, in)
    unit = F.normalize(x.to(computed_in(x.dtype)), dim=-1).to(_product_type(x, weight))
    loss = fused_cross_entropy(
        partial(MarginHead, margins), unit, weight, None, flat, options, chunk_rows=chunk_rows
    )
    if reduction == "none":
        return loss.view(target.shape)
    return loss


def _product_type(x: Tensor, weight: Tensor) -> torch.dtype:
    """Return the type in which features and centers are multiplied."""
    if torch.is_autocast_enabled(x.device.type) and torch.float64 not in (x.dtype, weight.dtype):
        return torch.get_autocast_dtype(x.device.type)
    if x.dtype != weight.dtype:
        msg = (
            f"features are {x.dtype} and class centers {weight.dtype}: cast one of them, or compute the loss "
            "under torch.autocast"
        )
        raise ConfigError(msg)
    return x.dtype


@explain_init
class MarginCrossEntropy(ParallelLayer):
    """A head of class centers and its loss with angular margins, for identities, products or words.

    Features and centers are compared by their cosine. The target's cosine has to be larger than the others'
    by a margin. The defaults are ArcFace's (arXiv:1801.07698); ``m2=0, m3=0.4`` is CosFace
    (arXiv:1801.09414), ``m1=1.35, m2=0`` SphereFace (arXiv:1704.08063) with a scale. Centers are split over
    the ranks of a group, and logits are in memory for a chunk of rows at a time.

    With ``sample_rate`` below 1 a training step computes with the centers of its own classes and a sample of
    the others (Partial FC, arXiv:2010.05222). The sample follows from ``seed`` and the CPU's default
    generator, from which each step takes one number. Ranks of the same seed take the same sample on any
    number of ranks. A resumed run and a recomputed forward pass take the sample that they had. In evaluation
    all centers take part.

    The optimizer decides how the other centers change. By default their gradient is 0, so momentum and weight
    decay move them as in the paper's second version (arXiv:2203.15565), and any optimizer works. With
    ``sparse=True`` the gradient has no rows for them, which saves its memory and the optimizer's time. Then
    :func:`tp_shard.update_sampled_rows` makes any element-wise optimizer leave those centers and their state
    untouched, as in the paper's first version.

    Collectives: see :func:`functional.parallel_margin_cross_entropy`. Making a layer broadcasts a generator's
    state.

    Args:
        in_features: Size of a feature.
        num_classes: The number of classes over all ranks; the ranks need not divide it.
        m1, m2, m3, scale, monotonic, label_smoothing, ignore_index, reduction, chunk_rows: As
            :func:`functional.parallel_margin_cross_entropy` takes them.
        sample_rate: The share of the other centers that take part in a training step, above 0 and at most 1.
        seed: A seed; another one gives another sequence of samples.
        sparse: Whether the centers' gradient is a sparse tensor of those that took part.
        device: The device of the centers.
        dtype: The type of the centers.
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
        Margins(m1, m2, m3, scale, monotonic)
        check_options(reduction, label_smoothing, 0.0)
        check_sample_rate(sample_rate)
        read_chunk_rows(chunk_rows, 1)
        if sparse and sample_rate == 1:
            msg = "sparse=True is for sampled centers: give a sample_rate below 1, or leave it out"
            raise ConfigError(msg)
        self.in_features = in_features
        self.num_classes = num_classes
        self.m1 = m1
        self.m2 = m2
        self.m3 = m3
        self.scale = scale
        self.monotonic = monotonic
        self.label_smoothing = label_smoothing
        self.ignore_index = ignore_index
        self.reduction = reduction
        self.sample_rate = sample_rate
        self.seed = seed
        self.sparse = sparse
        self.chunk_rows = chunk_rows
        self.group = as_group(group)
        self.dim = -1
        self.splits = {"weight": Split.even(0, num_classes, self.group.size)}
        shape = self.splits["weight"].local_shape((num_classes, in_features), self.group.rank)
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.mark_parameters()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw centers from a normal distribution; only their directions matter.

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
            DisagreementError: Ranks have different targets; checked on the CPU alone.
        """
        self.refuse_norms()
        sampled = None
        if self.training and self.sample_rate < 1:
            sampled = self.draw_sample()
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
        # From the CPU's generator, which all ranks have in the same state and checkpoints restore: every rank
        # draws the same sample
        # (`the_layer_trains_like_the_whole_one_and_a_resumed_one_goes_on_with_its_samples`).
        drawn = int(torch.randint(2**62, (), dtype=torch.int64, device="cpu"))
        return sample_classes(
            self.num_classes,
            self.sample_rate,
            drawn + self.seed,
            device=self.weight.device,
            group=self.group,
        )

    def extra_repr(self) -> str:
        """Return the layer's options."""
        described = (
            f"in_features={self.in_features}, num_classes={self.num_classes}, m1={self.m1}, m2={self.m2}, "
            f"m3={self.m3}, scale={self.scale}"
        )
        if self.sample_rate < 1:
            described += f", sample_rate={self.sample_rate}"
            if self.sparse:
                described += ", sparse=True"
        return described
