"""The options of fully sharded models, and what they mean for a job."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from tp_core._contracts._job import Job
from tp_core.arguments import explain_init
from tp_core.errors import ConfigError

UnitRule = str | type[nn.Module] | Sequence[str | type[nn.Module]] | Callable[[nn.Module], bool]
Switch = bool | Literal["auto"]
TypeRule = torch.dtype | Literal["auto"] | None

_OF_PRECISION = {"bf16-mixed": torch.bfloat16, "fp16-mixed": torch.float16}


@explain_init
@dataclass(frozen=True, slots=True)
class FullyShardOptions:
    """Options to shard parameters, gradients and optimizer state over ranks that read different samples.

    Attributes:
        units: The modules that are units. A unit's parameters are gathered together when it runs, and its
            gradients are reduced together. "auto" takes the blocks that a Hugging Face model names in
            ``_no_split_modules``, else blocks that repeat, else parts of similar size. Or a class, the
            name of a class, several of them, or a predicate of modules. Parameters in no unit are gathered
            with the whole model. Large units need memory, small ones many collectives.
        reshard_after_forward: Whether a unit's parameters are freed after its forward pass and gathered
            again for the backward pass (ZeRO-3), or kept until then (ZeRO-2): more memory, a third less
            communication. "auto" keeps them where the job's need of memory is known, and is free.
        replicas: The number of copies of the shards over the ranks (HSDP). With 2, each half of the ranks
            holds the whole model, and gradients are summed over the two halves. Consecutive ranks hold a
            copy together, so that it may stay within a host.
        param_dtype: The dtype in which parameters are gathered and computed with. "auto" follows the
            trainer's precision: the lower dtype of a mixed one, else the parameters' own, as ``None`` does.
            Those of one dimension (biases, norms, scales) keep their own.
        reduce_dtype: The dtype in which gradients are summed over ranks. "auto" is float32 wherever
            parameters have a lower dtype; ``None`` is the gradients' own.
        offload: Whether to keep shards, gradients and optimizer state in pinned memory of the host, and on
            the device only the unit that computes. "auto" does so only where nothing else is enough.
        activation_checkpointing: Whether to keep only the input of each unit, and to recompute the unit in
            the backward pass. "auto" does so only where activations would not fit otherwise.
        prefetch: The number of units to gather ahead, in the order in which they were found, while one
            computes. 1 is torch's default: the next unit's all-gather begins while one computes.

    Raises:
        ConfigError: A value is out of its range.

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
    """Return the dtype in which parameters are gathered; ``None`` for their own."""
    chosen = options.param_dtype
    if isinstance(chosen, str):
        return _OF_PRECISION.get(job.precision)
    return chosen


def reduction_type(options: FullyShardOptions, job: Job) -> torch.dtype | None:
    """Return the dtype in which gradients are summed; ``None`` for their own."""
    chosen = options.reduce_dtype
    if not isinstance(chosen, str):
        return chosen
    lower = parameter_type(options, job) in {torch.bfloat16, torch.float16}
    if lower or job.precision == "bf16-true":
        return torch.float32
    return None


def check_offload(options: FullyShardOptions, job: Job) -> None:
    """Check that offloading has an accelerator, and that this process can pin memory."""
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


def remedy(options: FullyShardOptions) -> str:
    """Return what lowers the memory of a rank, beside the options that do so already."""
    remedies = ["more ranks" if options.replicas == 1 else "fewer replicas"]
    if not options.reshard_after_forward:
        remedies.append("reshard_after_forward=True")
    if not options.activation_checkpointing:
        remedies.append("activation_checkpointing=True")
    if not options.offload:
        remedies.append("offload=True on an accelerator")
    remedies.append("smaller units")
    return f"less is needed with {', '.join(remedies)} or a smaller batch with accumulate="
