"""The options of the backend ``tuple``."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tp_core.arguments import explain_init
from tp_core.errors import ConfigError

if TYPE_CHECKING:  # options cost next to nothing
    from tp_tuple._balance import Weights


@explain_init
@dataclass(frozen=True, slots=True)
class TupleOptions:
    """The options of the backend ``tuple``.

    Attributes:
        weights: The share of each device: ``[2, 1]``, "memory", "auto" or ``None`` for even shares; see
            `tp_collate`.
        cost: The cost of an item, a number not below 0 in any unit; see `tp_collate`.
        adapter: The name of the collate adapter to use; "auto" takes the one that fits the samples
            best.
        force_copies: Give every replica parameters of its own, also on one device: for tests.
    """

    weights: "Weights" = None
    cost: Callable[[Any], float] | None = None
    adapter: str = "auto"
    force_copies: bool = False

    def __post_init__(self) -> None:
        if self.cost is not None and not callable(self.cost):
            msg = f"the option cost must be a function of an item, got {self.cost!r:.80}"
            raise ConfigError(msg)
        if not isinstance(self.adapter, str):
            msg = f"TupleOptions(adapter=...) must be a name, such as 'auto', got {self.adapter!r:.80}"
            raise ConfigError(msg)
