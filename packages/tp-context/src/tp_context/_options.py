"""The options of the backend ``context``."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, get_args

from tp_core.arguments import check_above_zero, explain_init
from tp_core.errors import ConfigError

AttentionAlgorithm = Literal["all-gather", "ulysses", "ring", "auto"]
"""What computes attention over slices: one of the algorithms of `tp_context._algorithms`, or the cheapest."""


@explain_init
@dataclass(frozen=True, slots=True)
class ContextOptions:
    """The options of the backend ``context``.

    Attributes:
        context: The number of ranks that share each sequence, -1 for all. The others divide the samples.
        weights: The backend that holds the weights, and averages gradients over all ranks: "whole" for a copy
            on each rank, "fsdp" for shards over data and context ranks alike, "shard" for tensors split in
            groups, of which ``context`` share a sequence, "pipeline" for stages on groups of ranks, of which
            ``context`` share one, too. Its own options are given by its own name.
        sequence: The dimension of the sequence in tensors of the batch, by name: ``{"tokens": 1}``. Entries
            of a tuple or list are named by their number: ``{"0": 1}``. Tensors without a name here stay
            whole. ``None`` finds them. An empty mapping keeps all of the batch whole, on each rank.
        check_tokens: The number of tokens of the check before the first step: it compares the split model
            with the whole one on a short piece of the batch. 0 chooses the number.
        attention: The algorithm by which queries reach the keys of other ranks: ``"all-gather"`` of keys and
            values, for any mask; ``"ulysses"``, which changes tokens for heads; ``"ring"``, in which no rank
            has all keys, for boolean and causal masks; or ``"auto"``, which costs least by the sizes.
        find_unused_parameters: For models that do not use every parameter in every step.
        bucket_cap_mb: Size of a communication bucket of gradients in MiB; ``None`` is torch's own choice.
        timeout_s: How many seconds a collective waits for the other ranks.
        bind_device: Whether to bind NCCL's process group to the device, as by ``device_id`` of torch's
            ``init_process_group``, so that it connects at once; ``False`` where it hangs so.

    Raises:
        ConfigError: A value is out of its range.
    """

    context: int = -1
    weights: str = "whole"
    sequence: Mapping[str, int] | None = None
    check_tokens: int = 0
    attention: AttentionAlgorithm = "all-gather"
    find_unused_parameters: bool = False
    bucket_cap_mb: float | None = None
    timeout_s: float = 600.0
    bind_device: bool = True

    def __post_init__(self) -> None:
        check_above_zero(self, "bucket_cap_mb", "timeout_s")
        if self.context != -1 and self.context < 1:
            msg = f"ContextOptions(context=...) must be -1 for all ranks, or their number, got {self.context}"
            raise ConfigError(msg)
        algorithms = get_args(AttentionAlgorithm)
        if self.attention not in algorithms:
            names = ", ".join(algorithms)
            msg = f"ContextOptions(attention=...) must be one of {names}, got {self.attention!r}"
            raise ConfigError(msg)
        if self.check_tokens < 0:
            msg = f"ContextOptions(check_tokens=...) must not be negative, got {self.check_tokens}"
            raise ConfigError(msg)
        if self.sequence is None:
            return
        if not isinstance(self.sequence, Mapping) or not all(
            isinstance(n, str) and type(d) is int and d >= 0 for n, d in self.sequence.items()
        ):
            msg = (
                "ContextOptions(sequence=...) must map names of the batch's tensors to the dimension of the "
                f"sequence, from 0, as in {{'tokens': 1}}; got {self.sequence!r}"
            )
            raise ConfigError(msg)
        object.__setattr__(self, "sequence", MappingProxyType(dict(self.sequence)))
