"""Pickles of what other processes cannot import, with the places of its code."""

from collections import ChainMap
from functools import cache
from io import BytesIO
from types import CodeType
from typing import Any, ClassVar

_NO_FILE = "<dynamic-code>"  # cloudpickle 3.1.3 puts it in place of every function's file


def dumps_by_value(obj: Any, **options: Any) -> bytes:
    """Pickle an object with cloudpickle: functions and classes of ``__main__`` go by value.

    Their code keeps the names of its files, which tracebacks and messages show.

    Args:
        obj: The object.
        **options: As for ``cloudpickle.Pickler``: protocol, buffer_callback.

    Raises:
        ImportError: cloudpickle is not installed.
        Exception: Something cannot be pickled.
    """
    stream = BytesIO()
    _pickler()(stream, **options).dump(obj)
    return stream.getvalue()


@cache
def _pickler() -> Any:
    import cloudpickle

    by_cloudpickle = cloudpickle.Pickler.dispatch_table

    def reduce_code(code: CodeType) -> Any:
        make, arguments, *others = by_cloudpickle[CodeType](code)
        named = (code.co_filename if isinstance(a, str) and a == _NO_FILE else a for a in arguments)
        return make, tuple(named), *others

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # it has no types
        dispatch_table: ClassVar[Any] = ChainMap({CodeType: reduce_code}, by_cloudpickle)

    return Pickler
