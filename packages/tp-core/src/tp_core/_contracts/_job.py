"""The description of a training job before anything starts, and its need of memory."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, Literal, Self, get_args

import torch
from torch import nn

from tp_core._contracts._batch import LossReduction
from tp_core._contracts._segments import CachingAllocator
from tp_core._launch._environment import LaunchEnvironment
from tp_core.arguments import explain_init
from tp_core.device_types import caches_segments
from tp_core.errors import ConfigError
from tp_core.modules._parameters import is_dtensor, is_sharded

_GIB = 2**30
_MEASURED_NBYTES = 64 * 2**20
"""The bytes of weights from which on the memory of a job is measured."""
_LEAST_PART = 0.05
"""The part of the free memory for weights, gradients and optimizer state, below which nothing is measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """The memory of training on a device that holds the whole model, in bytes: the input of estimates.

    Attributes:
        weights: Parameters and buffers, tied ones once.
        gradients: The gradients of all trained parameters.
        optimizer: The optimizer's state after its first step; ``None`` if that is not known.
        update: Temporary memory of an optimizer step.
        activations: The peak of a forward and backward pass besides all these, with one device's share of a
            batch; ``None`` if that is not known.
        alone: The same without the gradient that is being computed, for backends that count it themselves;
            in a mixed precision with parameters in the lower dtype, as those backends gather them.
        with_gradients: The peak of activations and gradients together: activations are freed while
            gradients are allocated.
        casts: The part of the activations that are copies of weights in the dtype of a mixed precision.
        batch: The device's share of the batch itself.
        part: The device's share of the samples, divided by the whole samples that were measured: below 1
            where a batch has too few for all devices. A device that gets parts of samples has so much.
        kept: The memory that the forward pass of each module keeps for backward, by the module's name, with
            parameters as for ``alone``.
        passed: The memory of each of these modules' outputs, by name.
        timeline: The memory of activations as for ``alone`` while each parameter's gradient is computed, in
            that order and by the parameter's name: the highest since the gradient before, the highest once
            there is memory for it, and what is left afterwards.
        trace: The blocks of the forward and backward pass, in their order; empty if they are not known. Each
            event is what happens, the number of a block, its bytes, and a name: a "batch" that is there
            before, a "value", one of a "fixed" size for any number of samples, a block to "free", a
            "gradient" of the named parameter in a block that exists; "begin" and "end" of a named module's
            forward pass; "backward", where that pass begins.
        lower_trace: The same as for ``alone`` in a mixed precision; empty if it is the same.
        update_trace: The blocks of the optimizer's first step and, after "again", those of a later one. A
            "state" stays.
        keys: The memory of keys and values in all calls of torch's attention.
        attentions: The number of these calls.
        attention: The call with the most scores, among those with a mask if there are any; empty without one.
            Its ``dtype``, the ``features`` of a head of keys and its ``value_features``, its ``mask`` (the
            dtype, or empty), whether there is ``dropout``, the number of its ``queries``, and the bytes of a
            ``row``: the scores of one query in float32, of all heads and samples.
        unknown: The reason why something is not known; empty if all is.
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
    part: float = 1.0
    kept: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    passed: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    timeline: Mapping[str, Sequence[int]] = field(default_factory=lambda: MappingProxyType({}))
    trace: Sequence[Sequence[Any]] = ()
    lower_trace: Sequence[Sequence[Any]] = ()
    update_trace: Sequence[Sequence[Any]] = ()
    keys: int = 0
    attentions: int = 0
    attention: Mapping[str, int | str] = field(default_factory=lambda: MappingProxyType({}))
    unknown: str = ""

    @property
    def states(self) -> int:
        """Weights, gradients and optimizer state; two values for each gradient where that is unknown."""
        return self.weights + self.gradients + self.optimizer_nbytes

    @property
    def optimizer_nbytes(self) -> int:
        """The optimizer's state; where it is not known, two values for each trained one, as AdamW has."""
        if self.optimizer is None:
            return 2 * self.gradients
        return self.optimizer

    @property
    def assumed(self) -> str:
        """The assumptions about the states, in words; empty without any."""
        if self.optimizer is not None:
            return ""
        return "optimizer not known, assumed to keep two values as AdamW"

    def with_batch_of(self, times: float) -> Self:
        """Return the footprint with a share of the batch that is ``times`` as large."""
        if self.activations is None or times == 1:
            return self
        own = self.activations - self.casts
        more = round(own * (times - 1))
        attention = dict(self.attention)
        if attention:
            attention["row"] = round(int(attention["row"]) * times)
        return replace(
            self,
            activations=self.activations + more,
            alone=round(self.alone * times),
            with_gradients=self.with_gradients + more,
            batch=round(self.batch * times),
            trace=_with_values_of(self.trace, times),
            lower_trace=_with_values_of(self.lower_trace, times),
            keys=round(self.keys * times),
            attention=attention,
            kept={name: round(n * times) for name, n in self.kept.items()},
            passed={name: round(n * times) for name, n in self.passed.items()},
            timeline={name: [round(n * times) for n in levels] for name, levels in self.timeline.items()},
        )

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON can say it."""
        values = {name: getattr(self, name) for name in self.__slots__}
        mappings = ("kept", "passed", "timeline", "attention")
        return values | {name: dict(getattr(self, name)) for name in mappings}


def _with_values_of(trace: Sequence[Sequence[Any]], times: float) -> list[Sequence[Any]]:
    """Return a trace with blocks ``times`` as large, where these grow with the samples."""
    events: list[Sequence[Any]] = []
    for what, number, nbytes, name in trace:
        size = nbytes
        if what in {"batch", "value"}:
            size = round(nbytes * times)
        events.append((what, number, size, name))
    return events


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryNeed:
    """The memory that a job needs on each device under one backend, in bytes, and the free memory.

    Attributes:
        weights: Parameters and buffers.
        gradients: Gradients.
        optimizer: The optimizer's state.
        communication: Buffers of communication, and whole units that are gathered.
        activations: Everything else at the peak of a step; ``None`` if it is not known.
        reserved: What the device's allocator reserves for all that, in whole segments; ``None`` if it
            reserves no more, or that is not known.
        free: The free memory of the device; ``None`` if that is not known.
        device: The name of the device, for messages.
        assumed: The assumptions in words: "optimizer state as of AdamW".
        remedy: The advice where the job does not fit.
        kernels: The kernels that the numbers count on, in words; empty where it makes no difference.

    Raises:
        ConfigError: A number is negative.
    """

    weights: int
    gradients: int
    optimizer: int
    communication: int = 0
    activations: int | None = None
    reserved: int | None = None
    free: int | None = None
    device: str = ""
    assumed: str = ""
    remedy: str = ""
    kernels: str = ""

    def __post_init__(self) -> None:
        for name in ("weights", "gradients", "optimizer", "communication", "activations", "reserved", "free"):
            value = getattr(self, name)
            if value is not None and value < 0:
                msg = f"{name} of a MemoryNeed must not be negative, got {value!r}"
                raise ConfigError(msg)

    @property
    def total(self) -> int:
        """The sum of the known numbers."""
        return self.weights + self.gradients + self.optimizer + self.communication + (self.activations or 0)

    @property
    def taken(self) -> int:
        """The bytes that the device has to have, reserved ones, or the sum where those are not known."""
        return max(self.total, self.reserved or 0)

    def with_reserved(self, peak: Callable[[], int | None]) -> Self:
        """Return the need with what is reserved, which is computed where the sum fits.

        Args:
            peak: Returns the most that is reserved.
        """
        if not self.fits:
            return self
        reserved = peak()
        if reserved is None:
            return self
        return replace(self, reserved=max(reserved, self.total))

    def with_reserved_as(self, other: Self) -> Self:
        """Return the need with as much reserved, in proportion to the sum, as another need has."""
        if other.reserved is None:
            return self
        return replace(self, reserved=math.ceil(self.total * other.reserved / max(1, other.total)))

    @property
    def fits(self) -> bool:
        """Whether the job fits, as far as both numbers are known."""
        return self.free is None or self.taken <= self.free

    @property
    def is_known(self) -> bool:
        """Whether no number is unknown or assumed."""
        return self.activations is not None and not self.assumed

    def __str__(self) -> str:
        """Return one sentence: the sum, the free memory, the parts."""
        unit, size = "MiB", 2**20
        if max(self.taken, self.free or 0) >= _GIB:
            unit, size = "GiB", _GIB

        digits = 1 if unit == "GiB" else 0

        def shown(nbytes: int) -> str:
            return f"{nbytes / size:.{digits}f}"

        if self.reserved is None:
            reserved = ""
        else:
            reserved = f" ({shown(self.reserved)} reserved)"
        least = "at least " if self.activations is None else ""
        where = f" on {self.device}" if self.device else ""
        if self.free is not None:
            free = f" of {shown(self.free)} free{where}"
        else:
            free = where
        parts = [
            f"weights {shown(self.weights)}",
            f"gradients {shown(self.gradients)}",
            f"optimizer {shown(self.optimizer)}",
        ]
        if self.communication:
            parts.append(f"communication {shown(self.communication)}")
        if self.activations is None:
            parts.append("activations unknown")
        else:
            parts.append(f"activations about {shown(self.activations)}")
        assumed = f" ({self.assumed})" if self.assumed else ""
        kernels = f"; {self.kernels}" if self.kernels else ""
        return (
            f"needs {least}{shown(self.total)} {unit}{reserved}{free}: {', '.join(parts)}{assumed}{kernels}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON can say it."""
        values = {name: getattr(self, name) for name in self.__slots__}
        return values | {"total": self.total, "fits": self.fits}


# -- The job --------------------------------------------------------------------------------------


Precision = Literal["fp32", "bf16-mixed", "fp16-mixed", "bf16-true"]
# What other trainers call them, each with the beginning of its names here.
_PRECISIONS = {"32": "fp32", "32-true": "fp32", "float32": "fp32", "no": "fp32", "16": "fp16", "fp16": "fp16"}
_PRECISIONS |= {"16-mixed": "fp16", "float16": "fp16", "bf16": "bf16", "bfloat16": "bf16"}
"""All in float32; steps under autocast to bfloat16, or to float16 with a scaled loss; or all in bfloat16."""

Recomputation = Literal["nothing", "all but matmuls", "every 2nd block", "every block"]
"""The activations that the backward pass computes again, the least first."""


@dataclass(frozen=True, slots=True)
class ModelTraits:
    """The traits of a model that backends assess.

    Attributes:
        parameter_count: Elements of all parameters, a tied one counted once.
        nbytes: Bytes of all parameters and buffers, tied ones counted once.
        has_sharded_parameters: Whether a parameter is one rank's shard of a larger one.
        requires_grad: Whether there is a parameter to train.
        has_dtensors: Whether a parameter is a DTensor: ``fully_shard`` or ``distribute_tensor`` made it
            before the model came here.
    """

    parameter_count: int
    nbytes: int
    has_sharded_parameters: bool
    requires_grad: bool
    has_dtensors: bool = False

    @classmethod
    def of(cls, model: nn.Module) -> Self:
        """Read the traits of ``model``."""
        parameters = list(model.parameters())
        tensors = [*parameters, *model.buffers()]
        return cls(
            parameter_count=sum(p.numel() for p in parameters),
            nbytes=sum(t.numel() * t.element_size() for t in tensors),
            has_sharded_parameters=any(map(is_sharded, parameters)),
            requires_grad=any(p.requires_grad for p in parameters),
            has_dtensors=any(map(is_dtensor, parameters)),
        )


@explain_init
@dataclass(frozen=True, slots=True, kw_only=True)
class CompileOptions:
    """How models are compiled.

    Attributes:
        blocks: Whether to compile the model's repeated blocks, and each class of them once, rather than the
            whole model: the first step takes much less time, a later one a little more.
        backend: torch's name of the compiler, as `torch.compile` takes it.
        mode: As `torch.compile` takes it.
        dynamic: As `torch.compile` takes it. With ``None`` a second shape is compiled for all sizes.
        fullgraph: Whether a break of the graph is an error.

    Example:
        >>> CompileOptions(blocks=True, backend="aot_eager").arguments()
        {'backend': 'aot_eager'}
    """

    blocks: bool = False
    backend: str = "inductor"
    mode: str | None = None
    dynamic: bool | None = None
    fullgraph: bool = False

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of `torch.compile` that differ from its defaults."""
        return {
            f.name: getattr(self, f.name)
            for f in fields(self)
            if f.name != "blocks" and getattr(self, f.name) != f.default
        }


def whole_model_arguments(job: "Job", backend: str) -> dict[str, Any]:
    """Return the arguments of `torch.compile` for a backend that compiles whole models alone.

    Raises:
        ConfigError: The job compiles blocks.
    """
    options = job.compile or CompileOptions()
    if options.blocks:
        msg = (
            f"backend {backend!r} makes replicas of the model and compiles each as a whole; take "
            "compile=True, or a process for each device: tp launch (pip install tp-launch)"
        )
        raise ConfigError(msg)
    return options.arguments()


@dataclass(frozen=True, slots=True)
class Job:
    """A training job, as far as it is known before anything starts.

    Attributes:
        devices: The devices of *this process*, as resolved; under a launcher that started several
            processes on a host it is the one device of this rank.
        environment: The launch environment of this process: rank, world size, hosts.
        explicit_devices: Whether the user named the devices. With "auto" a backend may use fewer of them,
            and says so in its verdict.
        model: The model to train, still plain; a ``ModuleList`` where there are several; ``None`` when
            it is not known yet.
        seed: The seed that orders the data, the same on all ranks.
        loss: Whether a step's loss is the "mean" over its samples, or their "sum".
        precision: The dtypes of computation; see :class:`tp_trainer.Trainer`.
        accumulate: The number of batches of one optimizer step.
        compile: How the model is compiled; ``None`` for not at all.
        options: Options for each backend by its name: an object of its ``options_type``, or a mapping of
            its fields.
        footprint: The memory of training on a device that holds the whole model; ``None`` where that is
            not known, or is little of the free memory.
        free_nbytes: The free memory of each device in bytes, with the model's memory there counted as free:
            the least over all ranks. ``None`` if it is not known.
        recomputation: What the trainer has the backward pass compute again; the footprint is measured with
            it. ``None`` leaves it to the backend.
        ranks_per_sample: The number of consecutive data ranks that get the same samples, of which each
            computes a part: 1, or what a backend asks for that opens another one for the weights; -1 for all.
        averages_gradients: Whether the session averages gradients over ranks. A backend that opens another
            one for the weights, and averages them itself, sets this to false.

    Raises:
        ConfigError: ``loss``, ``precision``, ``accumulate`` or ``ranks_per_sample`` has another value.
    """

    devices: tuple[torch.device, ...]
    environment: LaunchEnvironment
    explicit_devices: bool = False
    model: nn.Module | None = None
    seed: int = 0
    loss: LossReduction = "mean"
    precision: Precision = "fp32"
    accumulate: int = 1
    compile: CompileOptions | None = None
    options: Mapping[str, object] = field(default_factory=lambda: MappingProxyType({}))
    footprint: Footprint | None = None
    free_nbytes: int | None = None
    recomputation: Recomputation | None = None
    ranks_per_sample: int = 1
    averages_gradients: bool = True

    def __post_init__(self) -> None:
        for name, choices in (("loss", get_args(LossReduction)), ("precision", get_args(Precision))):
            value = getattr(self, name)
            if value not in choices:
                msg = f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}"
                similar = [
                    choice for choice in choices if choice.startswith(_PRECISIONS.get(str(value), "-"))
                ]
                if name == "precision" and similar:
                    msg = f"precision={value!r} is {' or '.join(map(repr, similar))} here"
                raise ConfigError(msg)
        if not isinstance(self.accumulate, int) or isinstance(self.accumulate, bool) or self.accumulate < 1:
            msg = f"accumulate must be a whole number from 1, got {self.accumulate!r}"
            raise ConfigError(msg)
        if self.ranks_per_sample != -1 and self.ranks_per_sample < 1:
            msg = f"ranks_per_sample must be -1 for all, or their number, got {self.ranks_per_sample!r}"
            raise ConfigError(msg)

    @property
    def traits(self) -> ModelTraits | None:
        """The traits of the model, or ``None`` when it is not known yet."""
        if self.model is None:
            return None
        return ModelTraits.of(self.model)

    def is_small(self, free_nbytes: int | None) -> bool:
        """Return whether the model needs so little memory that this decides nothing, and is not measured.

        Args:
            free_nbytes: The free memory of each device; ``None`` if it is not known.
        """
        traits = self.traits
        if traits is None:
            return True
        if self.recomputation is not None:  # which is chosen by what is measured
            return False
        # Weights, gradients and two values of an optimizer.
        states = 4 * traits.nbytes
        return traits.nbytes < _MEASURED_NBYTES or states < _LEAST_PART * (free_nbytes or 0)

    def new_allocator(self) -> CachingAllocator | None:
        """Return an allocator like the one of its devices; ``None`` where theirs has no segments."""
        if caches_segments(self.devices[0].type):
            return CachingAllocator(self.free_nbytes)
        return None


# -- Layouts: which ranks hold what ------------------------------------------------------------------


Axis = Literal["data", "fsdp", "context", "pipeline", "tensor"]
"""The axes of a mesh, the outermost first: ranks of the last one are neighbors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A way to put a job on ranks.

    Attributes:
        axes: The number of ranks along each axis; an axis that is left out has one.
        options: The options of backends by name, as a trainer takes them.
        setup: The lines that a script needs before the trainer gets the model; empty for none.
        microbatches: The number of equal parts of a reader's samples, as stages compute one after the other.

    Raises:
        ConfigError: An axis has another name, or fewer ranks than one.

    Example:
        >>> Layout(axes={"data": 2, "tensor": 4}).ranks
        8
    """

    axes: Mapping[Axis, int]
    options: Mapping[str, Mapping[str, object]] = field(default_factory=lambda: MappingProxyType({}))
    setup: str = ""
    microbatches: int = 1

    def __post_init__(self) -> None:
        axes = get_args(Axis)
        for axis, ranks in self.axes.items():
            if axis not in axes or ranks < 1:
                msg = (
                    f"an axis of a layout is one of {', '.join(axes)}, with ranks from 1, got {axis}={ranks}"
                )
                raise ConfigError(msg)

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        count = 1
        for ranks in self.axes.values():
            count *= ranks
        return count

    @property
    def readers(self) -> int:
        """The number of parts into which the samples of a batch are divided."""
        return self.axes.get("data", 1) * self.axes.get("fsdp", 1)


BUCKET_NBYTES = 25 * 2**20
"""The size of a bucket of gradients, as torch's DistributedDataParallel has it."""


def divisors(ranks: int, *, least: int = 2) -> list[int]:
    """Return the numbers that divide ``ranks``, from ``least`` on.

    Example:
        >>> divisors(12)
        [2, 3, 4, 6, 12]
    """
    return [n for n in range(least, ranks + 1) if ranks % n == 0]
