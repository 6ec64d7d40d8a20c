"""A rank that runs a function: ``python -m tp_trainer._launch._function_rank FOLDER``."""

import io
import os
import pickle
import sys
from pathlib import Path
from types import FunctionType
from typing import Any

__all__ = ["PAYLOAD", "dumps", "main", "result_path"]

PAYLOAD = "call.pickle"


def result_path(folder: Path, rank: int) -> Path:
    """Return where a rank leaves what the function returned."""
    return folder / f"result-{rank}.pickle"


def dumps(value: Any) -> bytes:
    """Pickle ``value``; with cloudpickle, where it is installed, also functions and classes of ``__main__``.

    Raises:
        Exception: ``value`` cannot be pickled; whatever pickle or the value raises.
    """
    try:
        import cloudpickle
    except ImportError:
        out = io.BytesIO()
        _ByName(out).dump(value)
        return out.getvalue()
    data: bytes = cloudpickle.dumps(value)
    return data


class _ByName(pickle.Pickler):
    """Refuses what other processes have under no name: their ``__main__`` is another one."""

    def reducer_override(self, value: Any) -> Any:
        """Return how to pickle ``value``: as always, or not at all."""
        if isinstance(value, type | FunctionType) and value.__module__ == "__main__":
            msg = f"{value.__qualname__} is defined in __main__, which without cloudpickle stays here"
            raise pickle.PicklingError(msg)
        return NotImplemented


def main(folder: Path) -> None:
    """Call the function and leave what it returns in ``folder``.

    Raises:
        TypeError: What it returned cannot be pickled.
    """
    with Path(folder, PAYLOAD).open("rb") as file:
        # The first of the two says where the modules are that the second needs.
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
    result_path(folder, int(os.environ["RANK"])).write_bytes(data)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
