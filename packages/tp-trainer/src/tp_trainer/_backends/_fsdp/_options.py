"""The options of the backend ``fsdp``."""

from dataclasses import dataclass

from tp_core.internal import check_above_zero
from tp_core.plugins import FullyShardOptions

__all__ = ["FsdpOptions"]


@dataclass(frozen=True, slots=True)
class FsdpOptions(FullyShardOptions):
    """The options of the backend ``fsdp``: those of `tp_core.plugins.FullyShardOptions`, and one more.

    Attributes:
        timeout_s: How many seconds a collective waits for the other ranks.

    Raises:
        ConfigError: A value is out of its range.

    Example:
        >>> FsdpOptions(units="GPT2Block", reshard_after_forward=False)  # doctest: +SKIP
    """

    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        FullyShardOptions.__post_init__(self)  # a dataclass with slots is another class than super() means
        check_above_zero(self, "timeout_s")
