"""Ranks from within a program or a notebook: a function in the place of a script."""

import contextlib
import os
import pickle
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeVar

from tp_core.errors import ConfigError, RankFailedError
from tp_core.internal import in_notebook

from tp_trainer._launch._function_rank import PAYLOAD, dumps, result_path

__all__ = ["launch"]

_RANK = "tp_trainer._launch._function_rank"

P = ParamSpec("P")
T = TypeVar("T")


def launch(
    function: Callable[P, T], processes: int | Literal["auto"] = "auto", /, *args: P.args, **kwargs: P.kwargs
) -> list[T]:
    """Call ``function`` on ranks of this host, each a new process, and return what each returned.

    It is ``tp launch`` for programs and notebooks: what the ranks print appears with their rank before it,
    the first that fails ends the others, and none outlives this process. The trainer is made within
    ``function``. Functions of a notebook, of ``__main__`` and lambdas need cloudpickle:
    ``pip install 'tp-trainer[notebook]'``.

    Args:
        function: What each rank calls, as it finds it here; what it changes stays in its process.
        processes: How many ranks; "auto" is one for each accelerator, or one.
        *args: Arguments for the function, the same for all ranks.
        **kwargs: More of them, by name.

    Returns:
        What the function returned, by rank, which are values that can be pickled.

    Raises:
        ConfigError: The function or an argument cannot be pickled; or this process is a rank itself.
        RankFailedError: A rank raised, with its traceback, or died.
        KeyboardInterrupt: Ctrl-C was pressed; the ranks were given time to save.

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
    from tp_trainer._launch._plan import make_plan
    from tp_trainer._launch._run import LaunchRequest, execute

    call = _pickled((function, args, kwargs))
    with tempfile.TemporaryDirectory(prefix="tp-call-") as name, _in_one_stream():
        folder = Path(name)
        (folder / PAYLOAD).write_bytes(pickle.dumps(sys.path) + call)
        request = LaunchRequest(script=_RANK, module=True, args=(name,), nproc_per_node=processes)
        count = make_plan(request).nproc
        outcome = execute(request, is_program=False)
        if outcome.stopped_by is not None:
            signal.raise_signal(outcome.stopped_by)  # it was meant for the program, too
        if outcome.status:
            raise RankFailedError(str(outcome.failure or outcome.message))
        return [_result(folder, rank) for rank in range(count)]


def _pickled(call: object) -> bytes:
    try:
        return dumps(call)
    except Exception as error:
        msg = (
            f"launch() sends the function and its arguments to other processes, which failed: {error!r}; "
            "import what is defined in a module, or pip install 'tp-trainer[notebook]' (cloudpickle)"
        )
        raise ConfigError(msg) from error


def _in_one_stream() -> contextlib.AbstractContextManager[object]:
    """Return a context in which a notebook does not show the lines of ranks in red."""
    return contextlib.redirect_stderr(sys.stdout) if in_notebook() else contextlib.nullcontext()


def _result(folder: Path, rank: int) -> Any:
    path = result_path(folder, rank)
    if not path.exists():
        msg = f"rank {rank} ended before the function returned: it called sys.exit() or os._exit()"
        raise RankFailedError(msg)
    return pickle.loads(path.read_bytes())
