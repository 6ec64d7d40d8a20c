"""``launch()``: calls a function on ranks, from a program or a notebook; each rank runs this module."""

import contextlib
import inspect
import io
import os
import pickle
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FunctionType
from typing import Any, Literal, ParamSpec, TypeVar

from tp_core.errors import ConfigError, RankFailedError
from tp_core.output import in_notebook
from tp_core.ranks import dumps_by_value

_CALL = "call.pickle"

P = ParamSpec("P")
T = TypeVar("T")


def launch(
    function: Callable[P, T], processes: int | Literal["auto"] = "auto", /, *args: P.args, **kwargs: P.kwargs
) -> list[T]:
    """Call ``function`` on ranks of this host, each a new process, and return their results.

    It is ``tp launch`` for programs and notebooks. Lines that ranks print appear with their rank in front,
    the first failure ends all ranks, and no rank outlives this process. Make the trainer within
    ``function``. Functions of a notebook, of ``__main__`` and lambdas need cloudpickle:
    ``pip install 'tp-launch[notebook]'``.

    Args:
        function: The function. Its changes to objects stay in the rank's process.
        processes: The number of ranks; "auto" is one for each accelerator, or one.
        *args: Positional arguments, the same for all ranks.
        **kwargs: Keyword arguments, the same for all ranks.

    Returns:
        The results by rank; they must be picklable.

    Raises:
        ConfigError: There is no function, or it does not take its arguments; it or one of them cannot be
            pickled; or this process is a rank.
        RankFailedError: A rank raised, with its traceback, or died.
        KeyboardInterrupt: Ctrl-C was pressed; the ranks had time to save.

    Example:
        >>> from operator import add
        >>> launch(add, 2, 3, 4)  # doctest: +SKIP
        [7, 7]
    """
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        msg = (
            f"launch() was called in rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}; start the "
            "program with python instead of a launcher, or call the function itself"
        )
        raise ConfigError(msg)
    if not callable(function):
        msg = f"launch() takes a function, the number of processes and its arguments, got {function!r:.80}"
        raise ConfigError(msg)
    _check_arguments(function, args, kwargs)
    from tp_launch._launch_plan import LaunchRequest, make_plan
    from tp_launch._local_run import execute

    call = _pickled((function, args, kwargs))
    with tempfile.TemporaryDirectory(prefix="tp-call-") as name, _in_one_stream():
        folder = Path(name)
        (folder / _CALL).write_bytes(pickle.dumps(sys.path) + call)
        # By its path: -m would look for modules in the current folder first.
        request = LaunchRequest(script=__file__, args=(name,), nproc_per_node=processes)
        count = make_plan(request).nproc
        outcome = execute(request, is_program=False)
        if outcome.stopped_by is not None:
            # The program's handlers are back by now: there Ctrl-C is a KeyboardInterrupt.
            signal.raise_signal(outcome.stopped_by)
        if outcome.status:
            raise RankFailedError(str(outcome.failure or outcome.message))
        return [_result(folder, rank) for rank in range(count)]


def _check_arguments(function: Callable[..., object], args: Sequence[object], kwargs: dict[str, Any]) -> None:
    """Make sure that the function takes its arguments, before any process starts."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some callables that are not written in Python have no signature
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        name = getattr(function, "__name__", type(function).__name__)
        msg = (
            f"launch() calls {name}{signature}, which does not take these arguments: {error}; the number of "
            f"processes is the second argument of launch(): launch({name}, 2, ...)"
        )
        raise ConfigError(msg) from None


def _result_path(folder: Path, rank: int) -> Path:
    return folder / f"result-{rank}.pickle"


def _pickled(call: object) -> bytes:
    try:
        return dumps(call)
    except Exception as error:
        msg = (
            f"launch() sends the function and its arguments to other processes, which failed: {error!r}; "
            "import what is defined in a module, or pip install 'tp-launch[notebook]' (cloudpickle)"
        )
        raise ConfigError(msg) from error


def _in_one_stream() -> contextlib.AbstractContextManager[object]:
    """Return a context that sends stderr to stdout in a notebook, which shows stderr in red."""
    if in_notebook():
        return contextlib.redirect_stderr(sys.stdout)
    return contextlib.nullcontext()


def _result(folder: Path, rank: int) -> Any:
    path = _result_path(folder, rank)
    if not path.exists():
        msg = f"rank {rank} ended before the function returned: it called sys.exit() or os._exit()"
        raise RankFailedError(msg)
    return pickle.loads(path.read_bytes())


def dumps(value: Any) -> bytes:
    """Pickle ``value``; with cloudpickle, if installed, also functions and classes of ``__main__``."""
    try:
        import cloudpickle  # noqa: F401
    except ImportError:
        out = io.BytesIO()
        _ByName(out).dump(value)
        return out.getvalue()
    return dumps_by_value(value)


class _ByName(pickle.Pickler):
    """A pickler that refuses objects of ``__main__``: other processes have another ``__main__``."""

    def reducer_override(self, value: Any) -> Any:
        """Refuse functions and classes of ``__main__``; pickle everything else as usual."""
        if isinstance(value, type | FunctionType) and value.__module__ == "__main__":
            msg = f"{value.__qualname__} is defined in __main__, which without cloudpickle stays here"
            raise pickle.PicklingError(msg)
        return NotImplemented


def main(folder: Path) -> None:
    """Call the function, in a rank, and write its result into ``folder``."""
    with Path(folder, _CALL).open("rb") as file:
        # Two pickles: the second needs modules that are found by the path in the first.
        sys.path[:] = pickle.load(file)
        function, args, kwargs = pickle.load(file)
    result = function(*args, **kwargs)
    try:
        data = dumps(result)
    except Exception as error:
        msg = (
            f"{function.__qualname__}() returned a {type(result).__name__}, which cannot be sent to the "
            f"program that launched it: {error}; return plain values or tensors"
        )
        raise TypeError(msg) from error
    _result_path(folder, int(os.environ["RANK"])).write_bytes(data)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
