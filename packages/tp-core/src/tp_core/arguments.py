"""Checks of arguments: unknown names, numbers out of range, methods that do not take what they must."""

import inspect
import math
import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import wraps
from typing import NamedTuple, ParamSpec, TypeVar

from tp_core.errors import ConfigError, ContractError
from tp_core.messages import closest, those_known

__all__ = ["as_names", "check_above_zero", "check_call", "explain_arguments", "explain_init"]

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

# The methods and classes that explain their arguments, by what a call of them looks like.
_explained: dict[str, inspect.Signature] = {}
_packages: dict[str, str] = {}
"""The packages that they belong to."""


def explain_init(kind: type[R], *, instead: Mapping[str, str] | None = None) -> type[R]:
    """Have a class answer arguments that it does not have; a decorator."""
    setattr(kind, "__init__", explain_arguments(f"{kind.__name__}(...)", instead=instead)(kind.__init__))  # noqa: B010 - typed
    return kind


def explain_arguments(
    call: str,
    *,
    instead: Mapping[str, str] | None = None,
    by_value: Mapping[str, Mapping[str, str]] | None = None,
    recognize: Callable[..., str | None] | None = None,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator for a method, which answers arguments that it does not have.

    It also refuses another value than a truth for an argument that is annotated as ``bool``: a text such as
    "no" would count as true. Where the method raises a ``TypeError``, a text in place of a number, or another
    object in place of a path, is the cause that is given.

    Args:
        call: The call as the documents write it, such as "fit(model, optimizer, loader, step=step)".
        instead: For names of other libraries what to write here.
        by_value: The same for single values of them, by their ``repr``: what to do in a clause.
        recognize: Gets the arguments of a call that does not fit, and returns a sentence on it, if it knows
            one.
    """
    words = _Answers(instead or {}, by_value or {})

    def decorate(method: Callable[P, R]) -> Callable[P, R]:
        signature = _explained[call] = inspect.signature(method)
        _packages[call] = method.__module__.partition(".")[0]
        truths = _truths_of(signature)

        @wraps(method)
        def explained(*args: P.args, **kwargs: P.kwargs) -> R:
            for place, name in truths:
                value = kwargs.get(name, False)
                if place < len(args):
                    value = args[place]
                if value is not True and value is not False:
                    _check_truth(call, name, value)
            try:
                return method(*args, **kwargs)
            except TypeError as error:
                # Only now: to bind the arguments of each call takes longer than many a method.
                problem = _misfit(signature, args, kwargs)
                if problem is None:
                    cause = _mistyped(signature, args, kwargs)
                    if cause is None:
                        raise
                    msg = f"{call.partition('(')[0]}({cause}"
                    raise ConfigError(msg) from error
            if recognize is None:
                advice = None
            else:
                advice = recognize(*args, **kwargs)
            raise ConfigError(advice or _answer(call, signature, kwargs, problem, words))

        return explained

    return decorate


def _truths_of(signature: inspect.Signature) -> tuple[tuple[int, str], ...]:
    """Return the place and the name of each parameter that is annotated as ``bool``."""
    truths: list[tuple[int, str]] = []
    for place, parameter in enumerate(signature.parameters.values()):
        if parameter.annotation not in (bool, "bool"):
            continue
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
            truths.append((place, parameter.name))
        elif parameter.kind is parameter.KEYWORD_ONLY:
            truths.append((sys.maxsize, parameter.name))
    return tuple(truths)


def _check_truth(call: str, name: str, value: object) -> None:
    """Check a value that is neither ``True`` nor ``False``: 0 and 1 will do, and so will numpy's truths."""
    if isinstance(value, int) or type(value).__name__ == "bool":
        return
    msg = f"{call.partition('(')[0]}({name}=...) must be True or False, got {value!r:.80}"
    raise ConfigError(msg)


_NUMBERS = (int, float, int | None, float | None)
_PATHS = (str | os.PathLike[str], str | os.PathLike[str] | None)


def _mistyped(
    signature: inspect.Signature, args: Sequence[object], kwargs: Mapping[str, object]
) -> str | None:
    """Return what is wrong with a text in place of a number, or another object in place of a path."""
    for name, value in signature.bind(*args, **kwargs).arguments.items():
        annotation = signature.parameters[name].annotation
        if isinstance(value, str) and annotation in _NUMBERS:
            return f"{name}=...) must be a number, got {value!r:.80}"
        if annotation in _PATHS and value is not None and not isinstance(value, str | os.PathLike):
            return f"{name}=...) must be a path, got {type(value).__name__}: {value!r:.80}"
    return None


def _misfit(signature: inspect.Signature, args: Sequence[object], kwargs: Mapping[str, object]) -> str | None:
    """Return why a call does not fit a signature; ``None`` if it does."""
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        return str(error)
    return None


class _Answers(NamedTuple):
    """What to write for arguments of other libraries, by their names, and by their values."""

    instead: Mapping[str, str]
    by_value: Mapping[str, Mapping[str, str]]


def _answer(
    call: str,
    signature: inspect.Signature,
    arguments: Mapping[str, object],
    reason: str,
    answers: _Answers,
) -> str:
    instead = answers.instead
    own = [name for name in signature.parameters if name not in ("self", "cls")]
    name = next((name for name in arguments if name not in own), None)
    method = call.partition("(")[0]
    if name is None:
        return f"{method}(): {reason}; write {call}"
    advice = answers.by_value.get(name, {}).get(repr(arguments[name]))
    if advice is not None:
        return f"{method}() has no argument {name!r}; for {arguments[name]!r} {advice}"
    if name in instead:
        return f"{method}() has no argument {name!r}; write {instead[name]}"
    begun = next((own_name for own_name in own if own_name.startswith(name)), None)
    if begun is not None:
        return f"{method}() has no argument {name!r}; did you mean {begun!r}? It has: {', '.join(own)}"
    # Settings are objects that are given to others; a function of another package is no answer.
    owners = [
        other
        for other, known in _explained.items()
        if name in known.parameters and (other.endswith("(...)") or _packages[other] == _packages[call])
    ]
    owners.sort(key=lambda other: other.endswith("(...)"))  # settings after methods
    if owners:
        return f"{method}() has no argument {name!r}, which belongs to {owners[0].partition('(')[0]}()"
    suggestion = closest(name, [*own, *instead]) or ""
    if suggestion in instead and suggestion not in own:
        return f"{method}() has no argument {name!r}; write {instead[suggestion]}"
    return f"{method}() has no argument {name!r}{those_known(name, own)}"


def check_call(method: Callable[..., object], contract: Callable[..., object], *, of: str) -> None:
    """Check that a method takes what its contract does: Python's own error would come in mid-run."""
    if getattr(method, "__func__", method) is contract:
        return
    parameters = list(inspect.signature(contract).parameters.values())[1:]  # the first is self
    keywords = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    try:
        inspect.signature(method).bind(*positional, **dict.fromkeys(keywords))
    except TypeError:
        keyword_only = ["*", *keywords] if keywords else []
        wanted = ", ".join(["self", *positional, *keyword_only])
        name = contract.__name__
        msg = f"{of} has a method {name}() that does not take what a run gives it; write {name}({wanted})"
        raise ContractError(msg) from None


def check_above_zero(options: object, *names: str) -> None:
    """Check that these options are ``None`` or finite numbers above 0."""
    for name in names:
        value = getattr(options, name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and not (is_number and 0 < value < math.inf):
            msg = f"{type(options).__name__}({name}=...) must be a finite number above 0, got {value!r}"
            raise ConfigError(msg)


def as_names(option: str, given: Collection[T] | str) -> "tuple[T | str, ...]":
    """Return the names that an option was given: a name alone, or a collection of them.

    Raises:
        ConfigError: It is neither.
    """
    if isinstance(given, str):
        return (given,)
    if not isinstance(given, Collection):
        msg = f"{option} must be a list of names, got {given!r}"
        raise ConfigError(msg)
    return tuple(given)
