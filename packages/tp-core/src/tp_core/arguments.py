"""Checks of arguments: unknown names, numbers out of range, methods that do not take what they must."""

import inspect
import math
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

        @wraps(method)
        def explained(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return method(*args, **kwargs)
            except TypeError:
                # Only now: to bind the arguments of each call takes longer than many a method.
                problem = _misfit(signature, args, kwargs)
                if problem is None:
                    raise
            if recognize is None:
                advice = None
            else:
                advice = recognize(*args, **kwargs)
            raise ConfigError(advice or _answer(call, kwargs, problem, words))

        return explained

    return decorate


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


def _answer(call: str, arguments: Mapping[str, object], reason: str, answers: _Answers) -> str:
    instead = answers.instead
    own = [name for name in _explained[call].parameters if name != "self"]
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
    owners = [other for other, known in _explained.items() if name in known.parameters]
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
