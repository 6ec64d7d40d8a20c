"""The options of the backend ``dp-gather``."""

from dataclasses import dataclass

from tp_core.internal import explain_init


@explain_init
@dataclass(frozen=True, slots=True)
class GatherOptions:
    """The options of the backend ``dp-gather``.

    Attributes:
        dim: The dimension of the rows, in inputs and outputs; at least 0.
        except_keywords: Keys of the model's output, at any depth, that stay in parts: tuples with each part's
            value, on its device.
        broadcast: Arguments of the model that each device gets whole, though they may be as long as the
            batch: names of its parameters, or places of positional arguments.
    """

    dim: int = 0
    except_keywords: tuple[str, ...] = ()
    broadcast: tuple[str | int, ...] = ()
