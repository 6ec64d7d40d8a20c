"""The options of the backend ``dp-gather``."""

from dataclasses import KW_ONLY, dataclass

from tp_core.arguments import as_names, explain_init


@explain_init
@dataclass(frozen=True, slots=True)
class GatherOptions:
    """The options of the backend ``dp-gather``.

    Attributes:
        dim: The dimension of the rows, in inputs and outputs; at least 0.
        except_keywords: Keys of the model's output, at any depth, that stay in parts: tuples with each part's
            value, on its device.
        samples: What has an entry for each sample, as a list of texts has, and is split like tensors. Names
            of the model's parameters, places of positional arguments, or keys at any depth; several keys with
            dots between them are a path: ``"targets.names"``.
        broadcast: What each device gets whole, named in the same way: tensors without a row for each sample,
            and lists that are as long as the batch without an entry for each.
    """

    dim: int = 0
    except_keywords: tuple[str, ...] = ()
    _: KW_ONLY
    samples: tuple[str | int, ...] = ()
    broadcast: tuple[str | int, ...] = ()

    def __post_init__(self) -> None:
        for option in ("except_keywords", "samples", "broadcast"):
            as_names(option, getattr(self, option))
