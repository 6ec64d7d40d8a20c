"""What is known of a training job before anything starts."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, Self

import torch
from torch import nn

from tp_core._contracts._memory import Footprint
from tp_core._launch._environment import LaunchEnvironment
from tp_core._steps._outputs import LossReduction
from tp_core._tensors._sharding import is_dtensor, is_sharded

__all__ = ["Job", "ModelTraits", "Precision"]

Precision = Literal["fp32", "bf16-mixed", "fp16-mixed", "bf16-true"]
"""All in float32; steps under autocast to bfloat16, or to float16 with a scaled loss; or all in bfloat16."""


@dataclass(frozen=True, slots=True)
class ModelTraits:
    """What a backend may want to know of a model without walking through it.

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


@dataclass(frozen=True, slots=True)
class Job:
    """What is known of a training job before anything starts.

    Attributes:
        devices: The devices of *this process*, as resolved; under a launcher that started several
            processes on a host it is the one device of this rank.
        environment: What launched this process: rank, world size, hosts.
        explicit_devices: Whether the user named the devices. Where they were left to "auto", a
            backend may use fewer of them, and says so in its verdict.
        model: The model to train, still plain; a ``ModuleList`` where there are several; ``None`` when
            it is not known yet.
        seed: The seed that orders the data, the same on all ranks.
        loss: Whether a step's loss is the "mean" over its samples, or their "sum".
        precision: What is computed in which type; see :class:`tp_trainer.Trainer`.
        accumulate: How many batches make one optimizer step.
        compile: Whether the model is compiled.
        options: Options for each backend by its name: an object of its ``options_type``, or a mapping of
            its fields.
        footprint: What training the model takes on a device that holds all of it; ``None`` where that is
            not known, or is little of what is free.
        free_nbytes: What is free on each device, in bytes, what the model holds there already included: the
            least over all ranks. ``None`` if it is not known.
    """

    devices: tuple[torch.device, ...]
    environment: LaunchEnvironment
    explicit_devices: bool = False
    model: nn.Module | None = None
    seed: int = 0
    loss: LossReduction = "mean"
    precision: Precision = "fp32"
    accumulate: int = 1
    compile: bool = False
    options: Mapping[str, object] = field(default_factory=lambda: MappingProxyType({}))
    footprint: Footprint | None = None
    free_nbytes: int | None = None

    @property
    def traits(self) -> ModelTraits | None:
        """The traits of the model, or ``None`` when it is not known yet."""
        return None if self.model is None else ModelTraits.of(self.model)
