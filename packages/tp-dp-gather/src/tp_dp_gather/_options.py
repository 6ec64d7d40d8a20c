"""The options of the backend ``dp-gather``."""

from dataclasses import dataclass

__all__ = ["GatherOptions"]


@dataclass(frozen=True, slots=True)
class GatherOptions:
    """The options of the backend ``dp-gather``.

    Attributes:
        dim: The dimension of the rows, in inputs and outputs.
        except_keywords: Keys of the model's output that stay in parts.
    """

    dim: int = 0
    except_keywords: tuple[str, ...] = ()
