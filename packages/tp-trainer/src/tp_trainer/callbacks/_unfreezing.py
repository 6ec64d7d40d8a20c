"""Gradual unfreezing: some parameters train from a later epoch on."""

from collections.abc import Mapping, Sequence

from torch import Tensor
from tp_core.arguments import explain_init
from tp_core.errors import ConfigError
from tp_core.plugins import Callback, RunView


@explain_init
class GradualUnfreezing(Callback):
    """Trains some parameters from the beginning, and others from a later epoch on.

    Until then their gradients are dropped after each backward pass, before clipping. So the optimizer leaves
    them unchanged, also by weight decay or momentum. They keep ``requires_grad``, which backends read when
    they prepare a model, so this works on every backend; it saves no computation.

    Args:
        epochs: For an epoch, from 1, the prefixes of the parameters' names that train from then on:
            ``{1: ["head"], 3: ["layer4"], 5: [""]}``. The prefix "" means all. Parameters without any prefix
            never train.

    Raises:
        ConfigError: An epoch or a prefix cannot be used.

    Source: Howard and Ruder, "Universal Language Model Fine-tuning for Text Classification", 2018,
    section 3.3, "gradual unfreezing".
    """

    def __init__(self, epochs: Mapping[int, Sequence[str]]) -> None:
        if not isinstance(epochs, Mapping):
            msg = (
                f"GradualUnfreezing takes a dict of epochs, such as {{1: ['head'], 3: ['']}}; got {epochs!r}"
            )
            raise ConfigError(msg)
        for epoch, prefixes in epochs.items():
            is_epoch = isinstance(epoch, int) and not isinstance(epoch, bool) and epoch >= 1
            if not is_epoch or isinstance(prefixes, str) or not all(isinstance(p, str) for p in prefixes):
                msg = (
                    "GradualUnfreezing takes epochs from 1, each with a list of prefixes of parameters' "
                    f"names, such as {{1: ['head']}}; got {{{epoch!r}: {prefixes!r}}}"
                )
                raise ConfigError(msg)
        self._epochs = {epoch: tuple(prefixes) for epoch, prefixes in epochs.items()}
        self._frozen: list[Tensor] = []

    def on_fit_start(self, run: RunView) -> None:
        """Find the frozen parameters, also if a resumed run starts within an epoch.

        Raises:
            ConfigError: No parameter's name has one of the prefixes.
        """
        names = [name for name, _ in run.model.named_parameters()]
        for prefix in (p for prefixes in self._epochs.values() for p in prefixes):
            if not any(_has_prefix(name, prefix) for name in names):
                msg = f"no parameter's name begins with {prefix!r}; they are {', '.join(names[:8])} ..."
                raise ConfigError(msg)
        self._freeze(run)

    def on_epoch_start(self, run: RunView) -> None:
        self._freeze(run)

    def _freeze(self, run: RunView) -> None:
        free = [p for epoch, prefixes in self._epochs.items() if epoch <= run.epoch for p in prefixes]
        self._frozen = [
            parameter
            for name, parameter in run.model.named_parameters()
            if not any(_has_prefix(name, prefix) for prefix in free)
        ]

    def on_backward_end(self, run: RunView) -> None:  # noqa: ARG002 - contract
        for parameter in self._frozen:
            parameter.grad = None


def _has_prefix(name: str, prefix: str) -> bool:
    return not prefix or name == prefix or name.startswith(prefix.rstrip(".") + ".")
