"""The head of a loss with margins: cosines of features and class centers, harder for the target's class.

The margins are those of ArcFace (Deng et al., arXiv:1801.07698), which are CosFace's (Wang et al.,
arXiv:1801.09414) and SphereFace's (Liu et al., arXiv:1704.08063) in one formula.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from tp_core.errors import ConfigError

from tp_shard.nn._loss._linear_head import Products
from tp_shard.nn._loss._options import LossOptions, Rows, computed_in
from tp_shard.nn._loss._softmax_parts import block_rows

__all__ = ["MarginHead", "MarginKind"]

_TINY = 1e-12  # shorter centers are divided by this, as torch.nn.functional.normalize does


@dataclass(frozen=True, slots=True)
class MarginKind:
    """Margins, and what becomes of the gradient of centers that were not sampled.

    Attributes:
        m1: By what the angle between a feature and its center is multiplied.
        m2: What is added to the angle then, in radians.
        m3: What is subtracted from its cosine.
        scale: By what cosines are multiplied to be logits.
        monotonic: Whether the cosine falls on beyond pi, as SphereFace has it, or rises again.
        sparse: Whether the gradient is a sparse tensor of the sampled centers.

    Raises:
        ConfigError: A number is out of range.
    """

    m1: float
    m2: float
    m3: float
    scale: float
    monotonic: bool
    sparse: bool

    def __post_init__(self) -> None:
        for name, least, most in [("m1", 0, math.inf), ("scale", 0, math.inf)]:
            value = getattr(self, name)
            if not least < value < most:
                msg = f"{name} is a finite factor above 0, got {value!r}"
                raise ConfigError(msg)
        if not 0 <= self.m2 <= math.pi:
            msg = f"m2 is an angle in radians, from 0 to pi, got {self.m2!r}"
            raise ConfigError(msg)
        if not 0 <= self.m3 < math.inf:
            msg = f"m3 is subtracted from a cosine and is 0 or more, got {self.m3!r}"
            raise ConfigError(msg)

    def open(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,  # noqa: ARG002 - there is none
        options: LossOptions,
        needed: tuple[bool, ...],
    ) -> "MarginHead":
        """Return the head over these tensors."""
        return MarginHead(self, x, weight, options, needed)

    def place(self, grad: Tensor, shape: torch.Size, options: LossOptions) -> Tensor:
        """Return the gradient of all centers out of that of the sampled ones."""
        if options.sampled is None:
            return grad
        if self.sparse:
            index = options.sampled.unsqueeze(0)
            return torch.sparse_coo_tensor(index, grad, shape, is_coalesced=True, check_invariants=False)
        return grad.new_zeros(shape).index_copy_(0, options.sampled, grad)

    def apply(self, cosine: Tensor) -> tuple[Tensor, Tensor]:
        """Return the cosines of targets with their margins, and the derivative by the cosines."""
        if self.m1 == 1 and self.m2 == 0:
            return cosine - self.m3, torch.ones_like(cosine)
        angle = cosine.acos().mul_(self.m1).add_(self.m2)
        value, slope = angle.cos(), angle.sin()
        if self.monotonic:
            turns = (angle / math.pi).floor_()
            sign = 1 - 2 * turns.remainder(2)
            value, slope = value * sign - 2 * turns, slope * sign
        # Where feature and center coincide the slope is infinite: sines below what can be resolved are one.
        sine = ((1 - cosine) * (1 + cosine)).clamp_min_(torch.finfo(cosine.dtype).eps).sqrt_()
        return value - self.m3, slope * self.m1 / sine


class MarginHead:
    """Scaled cosines. Centers are normalized where they have to be copied anyway, and there alone.

    Sampled centers are gathered, and for a half type all of them are cast: that copy is of unit length.
    Otherwise the centers are multiplied as they are, and the logits' columns are divided by their norms.

    Args:
        kind: The margins.
        x: Unit vectors of shape (rows, in), in the type of the products.
        weight: Centers of shape (local classes, in), of any norm.
        options: Which of them are sampled, and who communicates.
        needed: Whether the gradients of the two are needed.
    """

    def __init__(
        self, kind: MarginKind, x: Tensor, weight: Tensor, options: LossOptions, needed: tuple[bool, ...]
    ) -> None:
        self._kind, self._x, self._weight, self._sampled = kind, x, weight, options.sampled
        self._dtype = computed_in(weight.dtype)
        self._count = weight.size(0) if self._sampled is None else self._sampled.numel()
        self._inverse = torch.empty(self._count, dtype=self._dtype, device=weight.device)
        self._is_copied = self._sampled is not None or x.dtype != self._dtype
        self._factors = weight
        if self._is_copied:
            self._factors = torch.empty(self._count, weight.size(1), dtype=x.dtype, device=weight.device)
        for a, b in self._blocks():
            block = self._centers(a, b)
            inverse = torch.linalg.vector_norm(block, dim=1).clamp_min_(_TINY).reciprocal_()
            self._inverse[a:b] = inverse
            if self._is_copied:
                self._factors[a:b] = block * inverse.unsqueeze(1)
        self._columns = kind.scale if self._is_copied else self._inverse * kind.scale
        self._products = Products(x, self._factors, options, needed)
        self._slope = torch.ones(x.size(0), dtype=self._dtype, device=x.device)

    def logits(self, start: int, stop: int, rows: Rows) -> Tensor:
        """Return the scaled cosines of some rows, with their margins, in the type that is computed in."""
        logits = self._x[start:stop].mm(self._factors.t()).to(self._dtype).mul_(self._columns)
        if self._count:
            index = rows.index.unsqueeze(1)
            old = logits.gather(1, index).squeeze(1)
            new, slope = self._kind.apply((old / self._kind.scale).clamp_(-1, 1))
            self._slope[start:stop] = torch.where(rows.mine, slope, 1)
            logits.scatter_(1, index, torch.where(rows.mine, new * self._kind.scale, old).unsqueeze(1))
        return logits

    def add(self, grad: Tensor, start: int, stop: int, rows: Rows) -> None:
        """Add what the gradient of some rows' logits gives; it is overwritten.

        Collectives: begins an all-reduce of the features' gradient.
        """
        if self._count:
            index = rows.index.unsqueeze(1)
            grad.scatter_(1, index, grad.gather(1, index) * self._slope[start:stop].unsqueeze(1))
        self._products.add(grad.mul_(self._columns).to(self._x.dtype), start, stop)

    def gradients(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the gradients of the unit vectors and of the centers that have logits."""
        grad_x, grad = self._products.wait()
        if grad is not None:
            for a, b in self._blocks():  # a center's length changes nothing: what is along it goes
                block, inverse = grad[a:b], self._inverse[a:b].unsqueeze(1)
                unit = self._centers(a, b) * inverse
                block.addcmul_(unit, (unit * block).sum(1, keepdim=True), value=-1)
                if self._is_copied:
                    block.mul_(inverse)
        return grad_x, grad, None

    def _blocks(self) -> Iterator[tuple[int, int]]:
        step = block_rows(self._weight.size(1), self._weight.device)
        for a in range(0, self._count, step):
            yield a, min(self._count, a + step)

    def _centers(self, start: int, stop: int) -> Tensor:
        """Return some of the centers that have logits, in the type that is computed in."""
        if self._sampled is None:
            return self._weight[start:stop].to(self._dtype)
        return self._weight.index_select(0, self._sampled[start:stop]).to(self._dtype)
