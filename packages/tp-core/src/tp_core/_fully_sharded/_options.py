"""How a model is sharded over ranks, and what that means for a job."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from tp_core._contracts._job import Job
from tp_core.errors import ConfigError

UnitRule = str | type[nn.Module] | Sequence[str | type[nn.Module]] | Callable[[nn.Module], bool]
Switch = bool | Literal["auto"]
TypeRule = torch.dtype | Literal["auto"] | None

_OF_PRECISION = {"bf16-mixed": torch.bfloat16, "fp16-mixed": torch.float16}


@dataclass(frozen=True, slots=True)
class FullyShardOptions:
    """How parameters, gradients and optimizer state are sharded over the ranks that read different samples.

    Attributes:
        units: Which modules are units, whose parameters are gathered together when the module runs, and
            whose gradients are reduced together. "auto" takes the blocks that a Hugging Face model names in
            ``_no_split_modules``, else blocks that repeat, else parts of similar size. Or a class, the
            name of a class, several of them, or a function that is asked for each module. What no unit
            holds is gathered with the whole model. Large units need memory, small ones many exchanges.
        reshard_after_forward: Whether a unit's parameters are let go after its forward pass and gathered
            again for the backward pass (ZeRO-3), or kept until then (ZeRO-2): more memory, a third less
            communication. "auto" keeps them where what the job needs is known, and is less than is free.
        replicas: Over how many copies of the shards the ranks are spread (HSDP): with 2, half of the ranks
            hold the model together, and gradients are summed over the two halves. Ranks that follow each
            other hold a copy together, so that it may stay within a host.
        param_dtype: In which type parameters are gathered and computed with. "auto" follows the trainer's
            precision: the lower type of a mixed one, else that of the parameters, which ``None`` says too.
            Batch norms keep their own.
        reduce_dtype: In which type gradients are summed over ranks. "auto" is float32 wherever
            parameters are of a lower type; ``None`` is the type of the gradients.
        offload: Keep shards, gradients and optimizer state in the host's memory, pinned, and only what is
            being computed on the device. "auto" does so only where nothing else is enough.
        activation_checkpointing: Keep of each unit's activations only its input, and compute the unit again
            in the backward pass. "auto" does so only where activations would not fit otherwise.
        prefetch: How many units ahead are gathered, in the order in which they were found, while one
            computes. 1 is torch's own way: the next one's exchange begins while one computes.

    Raises:
        ConfigError: A value is out of its range, or two of them do not go together.

    Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020;
    for ``replicas`` Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", 2023,
    section 3.2.2, "hybrid sharding".

    Example:
        >>> FullyShardOptions(units="GPT2Block", reshard_after_forward=False).replicas
        1
    """

    units: UnitRule = "auto"
    reshard_after_forward: Switch = "auto"
    replicas: int = 1
    param_dtype: TypeRule = "auto"
    reduce_dtype: TypeRule = "auto"
    offload: Switch = "auto"
    activation_checkpointing: Switch = "auto"
    prefetch: int = 1

    def __post_init__(self) -> None:
        for name in ("replicas", "prefetch"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                msg = f"{type(self).__name__}({name}=...) must be a whole number from 1, got {value!r}"
                raise ConfigError(msg)
        for name in ("reshard_after_forward", "offload", "activation_checkpointing"):
            value = getattr(self, name)
            if not isinstance(value, bool) and value != "auto":
                msg = f"{type(self).__name__}({name}=...) must be True, False or 'auto', got {value!r}"
                raise ConfigError(msg)
        for name in ("param_dtype", "reduce_dtype"):
            value = getattr(self, name)
            is_type = isinstance(value, torch.dtype) and value.is_floating_point
            if not (is_type or value is None or value == "auto"):
                msg = (
                    f"{type(self).__name__}({name}=...) must be a type of floating point such as "
                    f"torch.bfloat16, 'auto' or None, got {value!r}"
                )
                raise ConfigError(msg)


def parameter_type(options: FullyShardOptions, job: Job) -> torch.dtype | None:
    """Return in which type parameters are gathered; ``None`` for their own."""
    chosen = options.param_dtype
    return _OF_PRECISION.get(job.precision) if isinstance(chosen, str) else chosen


def reduction_type(options: FullyShardOptions, job: Job) -> torch.dtype | None:
    """Return in which type gradients are summed; ``None`` for their own."""
    chosen = options.reduce_dtype
    if not isinstance(chosen, str):
        return chosen
    lower = parameter_type(options, job) in {torch.bfloat16, torch.float16}
    return torch.float32 if lower or job.precision == "bf16-true" else None


def check_offload(options: FullyShardOptions, job: Job) -> None:
    """Make sure that there is an accelerator, and memory that it copies from, where the host keeps shards.

    Raises:
        ConfigError: The job computes on the CPU, or no memory can be pinned.
    """
    if options.offload is not True:
        return
    if job.devices[0].type == "cpu":
        msg = (
            "offload=True moves shards from an accelerator to the host's memory, and this job computes on "
            "the CPU, where they are already; leave it out"
        )
        raise ConfigError(msg)
    try:
        torch.empty(1).pin_memory()
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        msg = (
            "offload=True keeps shards in pinned memory of the host, and torch cannot pin any here: "
            f"{reason}; raise the limit of locked memory (ulimit -l, or the container's), or leave it out"
        )
        raise ConfigError(msg) from error
