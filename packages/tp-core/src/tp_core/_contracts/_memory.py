"""What training takes of memory on one device, and what a job needs of it under one backend."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Self

from tp_core.errors import ConfigError

__all__ = ["Footprint", "MemoryNeed"]

_GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """What training takes on a device that holds the whole model, in bytes: what backends estimate from.

    Attributes:
        weights: Parameters and buffers, tied ones once.
        gradients: Those of all trained parameters.
        optimizer: What the optimizer keeps from its first step on; ``None`` if that is not known.
        update: What an optimizer step needs meanwhile.
        activations: The most that a forward and backward pass has at one time besides all these, with one
            device's share of a batch; ``None`` if that is not known.
        alone: The same without the gradient that is just being made, for backends that count it themselves.
        with_gradients: The most of activations and gradients together at one time: while the former go
            away the latter come.
        casts: How much of the activations are copies of weights in the type of a mixed precision.
        batch: The device's share of the batch itself.
        kept: What the forward pass of each module leaves for the backward pass, by the module's name.
        passed: What each of these modules gives to the next one, by name.
        unknown: Why something is not known; empty if all is.
    """

    weights: int
    gradients: int
    optimizer: int | None = None
    update: int = 0
    activations: int | None = None
    alone: int = 0
    with_gradients: int = 0
    casts: int = 0
    batch: int = 0
    kept: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    passed: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    unknown: str = ""

    @property
    def states(self) -> int:
        """Weights, gradients and optimizer state; two values for each gradient where that is unknown."""
        return self.weights + self.gradients + self.optimizer_nbytes

    @property
    def optimizer_nbytes(self) -> int:
        """The optimizer's state; where it is not known, two values for each trained one, as AdamW has."""
        return 2 * self.gradients if self.optimizer is None else self.optimizer

    @property
    def assumed(self) -> str:
        """In words what of the states is an assumption; empty if nothing is."""
        if self.optimizer is not None:
            return ""
        return "optimizer not known, assumed to keep two values as AdamW"

    def with_batch_of(self, times: float) -> Self:
        """Return what it is with a share of the batch that is so many times as large."""
        if self.activations is None or times == 1:
            return self
        own = self.activations - self.casts
        more = round(own * (times - 1))
        return replace(
            self,
            activations=self.activations + more,
            alone=max(0, self.alone + round((self.alone - self.casts) * (times - 1))),
            with_gradients=self.with_gradients + more,
            batch=round(self.batch * times),
            kept={name: round(n * times) for name, n in self.kept.items()},
            passed={name: round(n * times) for name, n in self.passed.items()},
        )

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON can say it."""
        values = {name: getattr(self, name) for name in self.__slots__}
        return values | {"kept": dict(self.kept), "passed": dict(self.passed)}


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryNeed:
    """What a job needs on each device under one backend, in bytes, and what there is.

    Attributes:
        weights: Parameters and buffers.
        gradients: Gradients.
        optimizer: The optimizer's state.
        communication: Buffers of what ranks or devices exchange, whole units that are gathered.
        activations: Everything else that a step has at its highest point; ``None`` if it is not known.
        free: What is free on the device; ``None`` if that is not known.
        device: Which device, for messages.
        assumed: What of it is an assumption, in words: "optimizer state as of AdamW".
        remedy: What to do where it does not fit.

    Raises:
        ConfigError: A number is negative.
    """

    weights: int
    gradients: int
    optimizer: int
    communication: int = 0
    activations: int | None = None
    free: int | None = None
    device: str = ""
    assumed: str = ""
    remedy: str = ""

    def __post_init__(self) -> None:
        for name in ("weights", "gradients", "optimizer", "communication", "activations", "free"):
            value = getattr(self, name)
            if value is not None and value < 0:
                msg = f"{name} of a MemoryNeed must not be negative, got {value!r}"
                raise ConfigError(msg)

    @property
    def total(self) -> int:
        """The sum of what is known."""
        return self.weights + self.gradients + self.optimizer + self.communication + (self.activations or 0)

    @property
    def fits(self) -> bool:
        """Whether it fits, as far as both numbers are known."""
        return self.free is None or self.total <= self.free

    @property
    def is_known(self) -> bool:
        """Whether nothing of it is unknown or assumed."""
        return self.activations is not None and not self.assumed

    def __str__(self) -> str:
        """Return one sentence: the sum, what is free, the parts."""
        unit, size = ("GiB", _GIB) if max(self.total, self.free or 0) >= _GIB else ("MiB", 2**20)

        def shown(nbytes: int) -> str:
            return f"{nbytes / size:.{1 if unit == 'GiB' else 0}f}"

        least = "at least " if self.activations is None else ""
        where = f" on {self.device}" if self.device else ""
        free = f" of {shown(self.free)} free{where}" if self.free is not None else where
        parts = [
            f"weights {shown(self.weights)}",
            f"gradients {shown(self.gradients)}",
            f"optimizer {shown(self.optimizer)}",
            *([f"communication {shown(self.communication)}"] if self.communication else []),
            "activations unknown"
            if self.activations is None
            else f"activations about {shown(self.activations)}",
        ]
        assumed = f" ({self.assumed})" if self.assumed else ""
        return f"needs {least}{shown(self.total)} {unit}{free}: {', '.join(parts)}{assumed}"

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON can say it."""
        values = {name: getattr(self, name) for name in self.__slots__}
        return values | {"total": self.total, "fits": self.fits}
