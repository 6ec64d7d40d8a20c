"""A custom loop: its hooks, its validation, and the events of the steps that the user's code makes."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer
from tp_core.errors import ConfigError
from tp_core.plugins import RunView

from tp_trainer._metrics import numbers_in
from tp_trainer._opening._boundaries import StepBoundaries
from tp_trainer._preparation import Preparation
from tp_trainer._running._build import build_loop
from tp_trainer._running._callbacks import Events
from tp_trainer._running._context import RunContexts
from tp_trainer._running._log import plan_log
from tp_trainer._running._loop import Loop, LoopHooks
from tp_trainer._running._settings import LoopSettings
from tp_trainer._running._step_events import ManualStepEvents, UnusedGradients
from tp_trainer._running._watchdog import watchdog_of

if TYPE_CHECKING:
    from tp_trainer._running._watchdog import Watchdog


def custom_loop(
    preparation: Preparation, contexts: RunContexts, settings: LoopSettings, batches: Iterable[Any]
) -> Loop:
    """Return the loop of a call of ``Trainer.loop``.

    Raises:
        ConfigError: The validation is no function.
        LoaderError: The loader has no length, or cannot be split over the ranks.
        DisagreementError: Ranks got different arguments.

    Collectives: as in `build_loop`.
    """
    validate = settings.validation and settings.validation.source
    if validate is not None and (isinstance(validate, Iterable) or not callable(validate)):
        msg = f"validation must be a function that returns numbers by name, got {type(validate).__name__}"
        raise ConfigError(msg)
    session = preparation.open(by="loop()")
    watchdog = watchdog_of(session.job.environment, settings.limits.step_timeout_s)
    hooks = CustomLoopHooks(
        preparation,
        settings.events,
        validate or dict,
        contexts=contexts,
        watchdog=watchdog,
        saves=settings.checkpoint is not None,
    )
    train = preparation.prepare_loader(batches, watched=True)
    optimizers = [value for value in settings.state.values() if isinstance(value, Optimizer)]
    logs = plan_log(preparation, settings, optimizers)
    return build_loop(preparation, settings, train, hooks=hooks, watchdog=watchdog, logs=logs)


class CustomLoopHooks(LoopHooks):
    """The hooks of a custom loop, in which the user's code makes the steps.

    Args:
        validate: The user's function; called if the run has a validation.
        contexts: Tell the trainer's calls within the loop what they take part in.
        watchdog: Counts the batches of the validation's evaluations as steps.
        saves: Whether the loop saves checkpoints.
    """

    def __init__(
        self,
        preparation: Preparation,
        events: Events,
        validate: Callable[[], Mapping[str, float]],
        *,
        contexts: RunContexts,
        watchdog: "Watchdog | None",
        saves: bool,
    ) -> None:
        self._preparation = preparation
        self._events = events
        self._validate = validate
        self._contexts = contexts
        self._watchdog = watchdog
        self._unused = UnusedGradients() if saves else None

    def note_save(self, step: int) -> None:
        if self._unused is not None:
            self._unused.warn(step)

    def validate(
        self,
        boundaries: StepBoundaries | None,
        max_batches: int | None,  # noqa: ARG002 - the user's function has its own loaders
    ) -> Mapping[str, float]:
        """Return the numbers of the user's validation. A signal ends its evaluations early."""
        with self._contexts.within(watchdog=self._watchdog, boundaries=boundaries):
            return numbers_in(self._validate())

    @contextmanager
    def while_open(self, loop: RunView) -> Iterator[None]:
        """Send the events of the steps made within the context, if a callback has them."""
        optimizers = loop.optimizers.values()
        with ExitStack() as stack:
            stack.enter_context(self._preparation.noting_draws())
            stack.enter_context(self._contexts.within(compares_ranks=True))
            if self._unused is not None:
                stack.enter_context(self._unused.watching(optimizers))
                stack.enter_context(self._contexts.within(unused=self._unused))
            if self._events.has("on_backward_end") or self._events.has("on_optimizer_step"):
                events = ManualStepEvents(self._preparation.session, loop, self._events)
                stack.enter_context(events.watching(optimizers))
                stack.enter_context(self._contexts.within(step_events=events))
            yield
