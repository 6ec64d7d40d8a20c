"""The callbacks of one run, given, named or self-joining, and the events sent to them."""

import time
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from typing import Any

import torch
from tp_core.arguments import check_call
from tp_core.discovery import Contribution, PluginRegistry
from tp_core.errors import ConfigError
from tp_core.output import get_logger
from tp_core.plugins import Callback, NamedCallback, RunView

log = get_logger("tp_trainer")

_EVENTS = [name for name in vars(Callback) if name.startswith("on_")]
# Names of events in Keras, Lightning and transformers, and what they are called here.
_THEIR_WORDS = {
    "train_epoch": "epoch",
    "batch": "step",
    "begin": "start",
    "train_step": "step",
    "train": "fit",
}


class CompileMonitor(Callback):
    """Logs "first_step_s", the seconds of the first step, and "compiled_graphs", then and after each epoch.

    It joins the runs of compiled models. Graphs that are added later come from new shapes, or from code that
    is compiled again for each value.
    """

    def __init__(self) -> None:
        self._began: float | None = None
        self._before = 0

    def on_fit_start(self, run: RunView) -> None:  # noqa: ARG002 - contract
        self._began, self._before = time.perf_counter(), _graphs()

    def on_step_end(self, run: RunView) -> None:
        if self._began is not None:
            if run.device.type != "cpu":
                torch.accelerator.synchronize(run.device)
            seconds, self._began = time.perf_counter() - self._began, None
            run.log(first_step_s=seconds, compiled_graphs=_graphs() - self._before)

    def on_epoch_end(self, run: RunView) -> None:
        run.log(compiled_graphs=_graphs() - self._before)


def _graphs() -> int:
    """Return the number of graphs that torch has compiled in this process."""
    from torch._dynamo.utils import counters  # takes seconds to import, and compiling has done so

    return int(counters["stats"]["unique_graphs"])


def find_callbacks(
    given: Iterable[Callback | str], plugins: PluginRegistry
) -> tuple[list[Callback], dict[Callback, str]]:
    """Return the callbacks of a run: those given, in their order, then those that join by themselves.

    Returns:
        All callbacks, and the names of those that joined by themselves. A joined callback that fails is
        left out; a given one ends the run.
    """
    if isinstance(given, str | Callback) or not isinstance(given, Iterable):
        msg = f"callbacks must be a list of callbacks or names, got {type(given).__name__}: {given!r}"
        raise ConfigError(msg)
    installed = {c.item.name: c for c in plugins.callbacks()}
    names: set[str] = set()
    chosen: list[Callback] = []
    for entry in given:
        if isinstance(entry, str):
            callback = _made(installed, entry, plugins)
        else:
            callback = entry
        if isinstance(entry, str):
            names.add(entry)
        if not isinstance(callback, Callback):
            if isinstance(callback, type):
                hint = f"; give an object: {callback.__name__}()"
            else:
                hint = ""
            msg = (
                "a callback must be an object of a subclass of tp_trainer.Callback, or the name of an "
                f"installed one, got {type(callback).__name__}: {callback!r}{hint}"
            )
            raise ConfigError(msg)
        _check_events(callback)
        if any(callback is other for other in chosen):
            msg = f"the callback {type(callback).__name__} is given twice: {callback!r}"
            raise ConfigError(msg)
        chosen.append(callback)
    joined: dict[Callback, str] = {}
    for name, contribution in installed.items():
        if not contribution.item.joins or name in names:
            continue
        try:
            callback = _loaded(contribution)
        except Exception as error:  # noqa: BLE001 - a plugin may raise anything
            log.warning("the callback %r of %s is left out: %r", name, contribution.distribution, error)
            continue
        chosen.append(callback)
        joined[callback] = name
    return chosen, joined


def _made(installed: dict[str, Contribution[NamedCallback]], name: str, plugins: PluginRegistry) -> Callback:
    if name not in installed:
        plugins.require(name)
        close = get_close_matches(name, installed, n=1)
        names = ", ".join(installed) or "none"
        if close:
            hint = f"did you mean {close[0]!r}?"
        else:
            hint = f"installed: {names}; or give an object: EarlyStopping()"
        if blocked := plugins.disabled():
            hint += f"; TP_DISABLE_PLUGINS blocks {', '.join(map(str, blocked))}"
        msg = f"no installed plugin brings a callback called {name!r}; {hint}"
        raise ConfigError(msg)
    contribution = installed[name]
    try:
        return _loaded(contribution)
    except Exception as error:
        msg = f"the callback {name!r} of {contribution.distribution} cannot be made: {error!r}"
        raise ConfigError(msg) from error


def _loaded(contribution: Contribution[NamedCallback]) -> Callback:
    callback = contribution.item.load()
    if not isinstance(callback, Callback):
        msg = f"load() must return a Callback, got {type(callback).__name__}: {callback!r}"
        raise TypeError(msg)
    _check_events(callback)
    return callback


def _check_events(callback: Callback) -> None:
    """Refuse a method that no event calls, also one of a mixin.

    Only the class is checked: a function stored on the object may be any attribute.
    """
    kind = type(callback)
    for name in dir(kind):
        if not name.startswith("on_") or name in _EVENTS or not callable(getattr(kind, name)):
            continue
        translation = name
        for theirs, ours in _THEIR_WORDS.items():
            translation = translation.replace(theirs, ours)
        close = get_close_matches(translation, _EVENTS, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        msg = (
            f"the callback {kind.__name__} has a method {name!r}, and a run has no such event: it would "
            f"never be called; {hint}The events are {', '.join(_EVENTS)}; begin a helper's name with '_on_'"
        )
        raise ConfigError(msg)
    for name in _EVENTS:
        check_call(getattr(callback, name), getattr(Callback, name), of=f"the callback {kind.__name__}")


class Events:
    """Sends the events of a run to its callbacks, in their order.

    One that joined by itself and fails is logged and left out.
    """

    def __init__(self, callbacks: Iterable[Callback], joined: Mapping[Callback, str]) -> None:
        self.callbacks = list(callbacks)
        self._joined = joined
        self._find()

    def _find(self) -> None:
        self._calls: dict[str, list[tuple[Callable[..., object], Callback | None]]] = {}
        for name in _EVENTS:
            calls = self._calls[name] = []
            for callback in self.callbacks:
                if _overrides(callback, name):
                    if callback in self._joined:
                        joined = callback
                    else:
                        joined = None
                    calls.append((getattr(callback, name), joined))

    def has(self, name: str) -> bool:
        return bool(self._calls[name])

    def send(self, name: str, *arguments: Any) -> None:
        for call, joined in self._calls[name]:
            if joined is None:
                if call(*arguments) is False:
                    raise ConfigError(_returned_false(call, name))
                continue
            try:
                call(*arguments)
            except Exception:
                callback_name = self._joined[joined]
                log.exception("the callback %r failed in %s and is left out of the run", callback_name, name)
                self.callbacks = [other for other in self.callbacks if other is not joined]
                self._find()  # on this rank alone: see `Requests`

    def states(self) -> dict[str, Callback]:
        """Return the callbacks by the names that their states have in checkpoints."""
        numbers: dict[str, int] = {}
        by_name = {}
        for callback in self.callbacks:
            kind = type(callback).__name__
            number = numbers[kind] = numbers.get(kind, -1) + 1
            by_name[f"{kind}:{number}"] = callback
        return by_name


def _returned_false(call: Callable[..., object], name: str) -> str:
    callback = type(getattr(call, "__self__", call)).__name__
    return (
        f"{name}() of the callback {callback} returned False, which does not end the run, as it does "
        'elsewhere; write run.stop("a reason"), or return nothing'
    )


def _overrides(callback: Callback, name: str) -> bool:
    return name in vars(callback) or getattr(type(callback), name) is not getattr(Callback, name)
