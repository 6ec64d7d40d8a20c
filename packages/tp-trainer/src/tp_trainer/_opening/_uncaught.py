"""An uncaught exception of a script that trains: what it shows, and the end of its process."""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

from tp_core.discovery import OWN_PACKAGES
from tp_core.errors import DisagreementError, TpError
from tp_core.launching import EXIT_REPORT, LOST_RANK, tells_of_lost_rank
from tp_core.output import print_to_stderr

P = ParamSpec("P")
R = TypeVar("R")

_TRIMMED = {"runpy", "torch", *OWN_PACKAGES}
"""The packages whose frames are left out."""
_COMMAND = "tp_trainer._train"
_HINT = "(TP_TRACEBACK=full shows the frames of tp and torch, too)"

# Calls that do not fit, as Python words it, and what to write. An answer in the methods themselves, as by
# `explain_arguments`, would cost time in each step.
_CALLS = {
    "Trainer.autocast() ": "write with trainer.autocast(): ..., and Trainer(precision='bf16-mixed')",
    "Trainer.backward() ": "write trainer.backward(loss), and of two losses trainer.backward(first + second)",
    "Trainer.global_loss() ": "write trainer.global_loss(loss)",
    "Trainer.no_sync() ": "write with trainer.no_sync(model): trainer.backward(loss)",
    "Trainer.run() ": "write trainer.run(step, model, batch)",
    "Trainer.update() ": "write trainer.update(model, optimizer, clip_norm=1.0)",
    "'Loop' has no len()": "write loop.steps_per_epoch",
    "'Loop' object is not an iterator": "write for batch in loop: ...",
    "'Loop' object is not subscriptable": "write for batch in loop: ...",
}

_THEIR_MODULES = ("tp_trainer._trainer", "tp_trainer._running._loop")

_GRACE_S = 15.0  # for a failed process to end by itself
_STDERR = 2


def with_brief_errors(method: Callable[P, R]) -> Callable[P, R]:
    """Have uncaught exceptions shown briefly from a call of a method on, those of its arguments included."""

    @wraps(method)
    def brief(*args: P.args, **kwargs: P.kwargs) -> R:
        show_uncaught_briefly()
        return method(*args, **kwargs)

    return brief


def show_uncaught_briefly() -> None:
    """Have an uncaught exception of this program show the user's own frames, unless it is interactive."""
    if not isinstance(sys.excepthook, UncaughtHook) and not hasattr(sys, "ps1"):
        sys.excepthook = UncaughtHook(sys.excepthook)


def end_after_failure() -> None:
    """End this process soon after an uncaught exception in its main thread.

    Non-daemon threads would keep it alive. The other ranks would wait for it in a collective, and the
    launcher for its exit (test_a_rank_that_failed_ends_although_it_has_a_thread).
    """
    show_uncaught_briefly()
    if isinstance(sys.excepthook, UncaughtHook):
        sys.excepthook.ends_process = True


class UncaughtHook:
    """An excepthook that shows an exception without the frames of tp and torch between the user's own.

    A rank that ends only because another one is gone shows a line. All ranks raise a ``DisagreementError``:
    the first of each host shows the script's line, the others the message alone, unless ``tp launch`` shows
    their output. ``TP_TRACEBACK=full`` has all frames of all ranks. Hooks of others, as of services that
    collect errors, get all frames, too.

    Attributes:
        ends_process: Whether the process gets 15 seconds to exit.
    """

    def __init__(self, show: Callable[..., Any]) -> None:
        self._show = show
        # Python's own prints, and torch's puts the rank in front of what that prints.
        self._prints = getattr(show, "__module__", "").partition(".")[0] in ("sys", "torch")
        self.ends_process = False

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if self.ends_process:
            # A daemon: another thread would itself keep the process alive.
            threading.Thread(target=_end, name="tp-failed-end", daemon=True).start()
        if not self._prints or os.environ.get("TP_TRACEBACK") == "full":
            self._show(kind, error, trace)
            return
        if self.ends_process and _is_consequence(error):
            print_to_stderr(_in_one_line(error, trace))
            return
        answer = _answer(error, trace)
        if answer and answer not in getattr(error, "__notes__", ()):
            error.add_note(answer)
        if not isinstance(error, TpError) and _HINT not in getattr(error, "__notes__", ()):
            error.add_note(_HINT)
        whole = [(each, each.__traceback__) for each in _chain(error)]
        try:
            for each, its_trace in whole:
                is_inner = each is not error and isinstance(error, TpError)
                # Of what tp itself has caught, and raises anew with a sentence, the message is enough.
                is_message = is_inner and all(map(_is_trimmed, _frames(its_trace)))
                if is_message:
                    each.__traceback__ = None
                else:
                    each.__traceback__ = trimmed(its_trace, error=each)
            # `tp launch` shows what its ranks have in common once; other launchers show all of it.
            is_repeated = os.environ.get("LOCAL_RANK", "0") != "0" and EXIT_REPORT not in os.environ
            if isinstance(error, DisagreementError) and is_repeated:
                error.__traceback__ = None
            self._show(kind, error, error.__traceback__)
        finally:
            for each, its_trace in whole:  # a debugger may come later
                each.__traceback__ = its_trace


def _answer(error: BaseException, trace: TracebackType | None) -> str:
    """Return what to write for a call that does not fit a method of tp's; nothing for other errors."""
    answers = [answer for words, answer in _CALLS.items() if words in str(error)]
    if not answers or not isinstance(error, TypeError):
        return ""
    # Others have a class Trainer with such methods, too.
    for step in _frames(trace):
        for value in (*step.tb_frame.f_locals.values(), *step.tb_frame.f_globals.values()):
            if type(value).__module__ in _THEIR_MODULES:
                return answers[0]
    return ""


def trimmed(trace: TracebackType | None, *, error: BaseException) -> TracebackType | None:
    """Return a copy of a traceback without the frames of tp and torch.

    The last frame stays, in which the error was raised, unless tp raised it on purpose.
    """
    frames = list(_frames(trace))
    kept = [step for step in frames if not _is_trimmed(step)]
    if not kept:
        return trace
    if kept[-1] is not frames[-1] and not isinstance(error, TpError):
        kept.append(frames[-1])
    copy = None
    for step in reversed(kept):
        copy = TracebackType(copy, step.tb_frame, step.tb_lasti, step.tb_lineno)
    return copy


def _frames(trace: TracebackType | None) -> Iterator[TracebackType]:
    """Yield the steps of a traceback; of a function that ``tp train`` has called, those below it."""
    steps = []
    while trace is not None:
        steps.append(trace)
        trace = trace.tb_next
    calls = [i for i, step in enumerate(steps) if step.tb_frame.f_globals.get("__name__") == _COMMAND]
    if calls:
        steps = steps[calls[-1] :]
    yield from steps


def _is_trimmed(step: TracebackType) -> bool:
    names = step.tb_frame.f_globals
    # A module that runs as a program is "__main__", and has its package.
    package = names.get("__package__") or names.get("__name__") or ""
    return str(package).partition(".")[0] in _TRIMMED


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception, and those that caused it or that it consists of."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        each = waiting.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        waiting += [each.__cause__, each.__context__]
        if isinstance(each, BaseExceptionGroup):
            waiting += each.exceptions


def _is_consequence(error: BaseException) -> bool:
    """Return whether an error says no more than that another rank is gone."""
    text = f"{type(error).__name__}: {error}"
    # Of a timeout the frames count: ranks that wait in different places may all be alive.
    is_timeout = "timeout" in text.lower() or "timed out" in text.lower()
    return isinstance(error, RuntimeError) and not is_timeout and tells_of_lost_rank(text)


def _in_one_line(error: BaseException, trace: TracebackType | None) -> str:
    steps = [step for step in _frames(trace) if not _is_trimmed(step)]
    where = ""
    if steps:
        name = Path(steps[-1].tb_frame.f_code.co_filename).name
        where = f" at line {steps[-1].tb_lineno} of {name}"
    text = " ".join(str(error).split())
    return f"{LOST_RANK}{where}, and ends: {type(error).__name__}: {text}"


def _end() -> None:
    time.sleep(_GRACE_S)
    main = threading.main_thread()
    names = [thread.name for thread in threading.enumerate() if not thread.daemon and thread is not main]
    if names:  # otherwise an atexit function may still be at work: let it finish
        text = f"tp_trainer: this rank has failed, and is ended although it has threads: {', '.join(names)}\n"
        os.write(_STDERR, text.encode())
        os._exit(1)
