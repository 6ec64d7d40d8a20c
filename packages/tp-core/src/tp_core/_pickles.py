"""Pickles of what other processes cannot import: functions and classes of scripts, and objects beside them.

cloudpickle writes functions and classes of ``__main__`` by value. Objects beside them are written here as a
process that runs the script again would have them: caches of functions begin empty, locks are free. Each
process has one of each such global, whichever pickle brought it: functions that share a lock share it there.
"""

import contextlib
import contextvars
import copyreg
import functools
import importlib
import io
import os
import sys
import threading
import typing
from collections import ChainMap, Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any, ClassVar

_NO_FILE = "<dynamic-code>"  # cloudpickle 3.1.3 puts it in place of every function's file


def dumps_by_value(
    obj: Any, *, reducers: Mapping[type, Callable[[Any], Any]] | None = None, **options: Any
) -> bytes:
    """Pickle an object with cloudpickle: functions and classes of ``__main__`` go by value.

    Their code keeps the names of its files, which tracebacks and messages show. Globals that they use go with
    them: functions with caches begin with empty ones, and locks are free. An open file is refused.

    Args:
        obj: The object.
        reducers: Functions that reduce the objects of a type, as in ``copyreg``.
        options: The options of a pickler.

    Raises:
        ImportError: cloudpickle is not installed.
        Exception: Something cannot be pickled.
    """
    kind = _pickler()
    if reducers:
        kind = type(kind.__name__, (kind,), {"dispatch_table": kind.dispatch_table.new_child(reducers)})
    stream = io.BytesIO()
    kind(stream, **options).dump(obj)
    return stream.getvalue()


@functools.cache
def _pickler() -> Any:
    import cloudpickle

    by_cloudpickle = cloudpickle.Pickler.dispatch_table

    def reduce_code(code: CodeType) -> Any:
        make, arguments, *others = by_cloudpickle[CodeType](code)
        named = (code.co_filename if isinstance(a, str) and a == _NO_FILE else a for a in arguments)
        return make, tuple(named), *others

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # it has no types
        dispatch_table: ClassVar[Any] = ChainMap({CodeType: reduce_code, **_REDUCERS}, by_cloudpickle)

        def reducer_override(self, obj: Any) -> Any:
            kind = type(obj)
            reduced: Any = NotImplemented
            if kind is FunctionType:
                reduced = _reduce_function(obj)
            elif kind.__module__ == "__main__" and kind not in self.dispatch_table:
                reduced = _reduce_instance(obj)
            elif kind.__module__.startswith("torch.jit"):
                reduced = _reduce_script(obj)
            elif kind.__module__ == "ctypes":
                reduced = _reduce_library(obj)
            if reduced is NotImplemented:
                reduced = super().reducer_override(obj)
            return reduced

    return Pickler


# -- Modules that are pickled by value --------------------------------------------------------------


_registered: Counter[str] = Counter()  # the modules registered here, not by the user
_registry_lock = threading.Lock()  # short, and never over a user's code: it is held in each fork
if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(
        before=_registry_lock.acquire,
        after_in_parent=_registry_lock.release,
        after_in_child=_registry_lock.release,
    )


@contextlib.contextmanager
def pickled_by_value(modules: Iterable[ModuleType]) -> Iterator[None]:
    """Have cloudpickle pickle modules by value; those that the user has registered stay registered.

    Its list of modules is one for all threads, so blocks that overlap count how often each is in use.
    """
    import cloudpickle

    with _registry_lock:
        theirs = cloudpickle.list_registry_pickle_by_value() - _registered.keys()
        ours = [module for module in modules if module.__name__ not in theirs]
        for module in ours:
            cloudpickle.register_pickle_by_value(module)
            _registered[module.__name__] += 1
    try:
        yield
    finally:
        with _registry_lock:
            for module in ours:
                _registered[module.__name__] -= 1
                if not _registered[module.__name__]:
                    del _registered[module.__name__]
                    cloudpickle.unregister_pickle_by_value(module)


# -- Objects that a script makes ---------------------------------------------------------------------


def _is_importable(obj: Any) -> bool:
    """Return whether another process finds an object by its module and its name."""
    import cloudpickle

    name = getattr(obj, "__module__", None)
    if name is None or name == "__main__" or name in cloudpickle.list_registry_pickle_by_value():
        return False
    target: Any = sys.modules.get(name)
    for part in obj.__qualname__.split("."):
        target = getattr(target, part, None)
    return target is obj


# The type of functions with a cache, and the code of those that choose by the type of an argument: private to
# functools, and found without a name of it.
_CachedFunction = type(functools.cache(len))
_DISPATCH = functools.singledispatch(len).__code__  # type: ignore[attr-defined]  # it is a function


def _reduce_cached_function(function: Any) -> Any:
    if _is_importable(function):
        return function.__reduce__()
    attributes = {name: value for name, value in vars(function).items() if name != "__wrapped__"}
    return _make_cached_function, (function.__wrapped__, function.cache_parameters()), attributes


def _make_cached_function(function: Callable[..., Any], parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


def _reduce_cached_property(value: functools.cached_property[Any]) -> Any:
    # Python 3.11 has a lock in each, which a new one has of its own.
    attributes = {name: part for name, part in vars(value).items() if name != "lock"}
    return functools.cached_property, (value.func,), attributes


def _reduce_new_type(value: Any) -> Any:
    if _is_importable(value):
        return value.__reduce__()
    return typing.NewType, (value.__name__, value.__supertype__), vars(value)


def _reduce_function(function: Any) -> Any:
    if hasattr(function, "_torchdynamo_orig_callable"):
        msg = f"{function.__qualname__} was made by torch.compile, and is compiled for this process alone"
        raise TypeError(msg)
    if _is_importable(function):
        return NotImplemented
    if function.__code__ is not _DISPATCH:
        return _reduce_wrapper(function)
    # The others follow when the function is there: they may use it.
    default = function.registry[object]
    return functools.singledispatch, (default,), dict(function.registry), None, None, _register_all


def _reduce_wrapper(function: FunctionType) -> Any:
    """Reduce what a decorator of a library has put around a function: its globals are those of the library.

    ``functools.wraps`` gives it the module of that function. cloudpickle would copy the globals with it, and
    the wrapper that torch puts around the ``step`` of each optimizer would miss the hooks of the new process.
    """
    import cloudpickle

    name = function.__globals__.get("__name__", "")
    is_own = name in {"__main__", function.__module__, *cloudpickle.list_registry_pickle_by_value()}
    if is_own or function.__globals__ is not getattr(sys.modules.get(name), "__dict__", None):
        return NotImplemented
    closure = function.__closure__ or ()
    contents = {}  # they follow when the function is there: they may have it in them
    for number, cell in enumerate(closure):
        with contextlib.suppress(ValueError):  # it is empty
            contents[number] = cell.cell_contents
    special = {key: getattr(function, key) for key in _OF_FUNCTIONS}
    state = vars(function), special, contents
    return _make_wrapper, (name, function.__code__, len(closure)), state, None, None, _fill_wrapper


_OF_FUNCTIONS = (
    "__annotations__",
    "__defaults__",
    "__doc__",
    "__kwdefaults__",
    "__module__",
    "__name__",
    "__qualname__",
)


def _make_wrapper(module: str, code: CodeType, cells: int) -> FunctionType:
    closure = tuple(CellType() for _ in range(cells)) or None
    return FunctionType(code, vars(importlib.import_module(module)), closure=closure)


def _fill_wrapper(
    function: FunctionType, state: tuple[dict[str, Any], dict[str, Any], dict[int, Any]]
) -> None:
    attributes, special, contents = state
    vars(function).update(attributes)
    for key, value in special.items():
        setattr(function, key, value)
    for number, value in contents.items():
        (function.__closure__ or ())[number].cell_contents = value


def _register_all(function: Any, registry: Mapping[type, Callable[..., Any]]) -> None:
    for kind, implementation in registry.items():
        function.register(kind, implementation)


def _reduce_instance(obj: Any) -> Any:
    """Reduce an instance of a class of the script."""
    if isinstance(obj, type):
        return NotImplemented
    reduced = obj.__reduce_ex__(5)
    if not isinstance(reduced, str):
        return reduced
    # The name of a global, such as that of a value which stands for a missing one, and is compared by ``is``.
    return _global_of, ("__main__", reduced, copyreg.__newobj__, (type(obj),)), vars(obj) or None  # type: ignore[attr-defined]  # typeshed does not know it


def _reduce_script(obj: Any) -> Any:
    torch: Any = sys.modules["torch"]
    if not isinstance(obj, torch.jit.ScriptModule | torch.jit.ScriptFunction):
        return NotImplemented
    stream = io.BytesIO()
    torch.jit.save(obj, stream)
    return _load_script, (stream.getvalue(),)


def _load_script(data: bytes) -> Any:
    import torch

    return torch.jit.load(io.BytesIO(data))


_USES_ERRNO = 0x8  # FUNCFLAG_USE_ERRNO of ctypes, whose name is private


def _reduce_library(library: Any) -> Any:
    """Reduce a library of ctypes, with the types of the functions that the program has named."""
    ctypes: Any = sys.modules["ctypes"]
    if type(library) not in {ctypes.CDLL, ctypes.PyDLL}:
        return NotImplemented
    functions = {
        name: (function.restype, function.argtypes, function.errcheck)
        for name, function in vars(library).items()
        if isinstance(function, library._FuncPtr)
    }
    uses_errno = bool(library._FuncPtr._flags_ & _USES_ERRNO)
    return _open_library, (type(library), library._name, uses_errno, functions)


def _open_library(kind: Any, name: str | None, uses_errno: bool, functions: dict[str, Any]) -> Any:
    library = kind(name, use_errno=uses_errno)
    for function, (restype, argtypes, errcheck) in functions.items():
        pointer = getattr(library, function)
        pointer.restype = restype
        if argtypes is not None:
            pointer.argtypes = argtypes
        if errcheck is not None:
            pointer.errcheck = errcheck
    return library


def _reduce_file(file: Any) -> Any:
    for name in ("stdout", "stderr", "__stdout__", "__stderr__"):
        if file is getattr(sys, name):
            return getattr, (sys, name)
    msg = f"an open file ({file.name!r}) cannot travel to another process; send its name, and open it there"
    raise TypeError(msg)


# -- Globals that each process has one of ------------------------------------------------------------

_made: dict[tuple[str, str], Any] = {}
"""The globals that were made here, as their module is not there: by its name and their own."""


def _global_of(module: str, name: str, make: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Return the global of this process; make it if there is none."""
    value = make(*arguments)
    existing: Any = sys.modules.get(module)
    for part in name.split("."):
        existing = getattr(existing, part, None)
    if type(existing) is type(value):
        return existing
    return _made.setdefault((module, name), value)


def _place_of(obj: Any) -> tuple[str, str] | None:
    """Return the module and the name of a global of a script, or of a module that goes by value.

    An attribute of a class there is one, too.
    """
    import cloudpickle

    for module in ("__main__", *cloudpickle.list_registry_pickle_by_value()):
        for name, value in list(vars(sys.modules[module]).items()):
            if value is obj:
                return module, name
            if isinstance(value, type) and value.__module__ == module:
                for attribute, part in list(vars(value).items()):
                    if part is obj:
                        return module, f"{name}.{attribute}"
    return next((place for place, value in _made.items() if value is obj), None)


def _as_global(
    make: Callable[..., Any], arguments_of: Callable[[Any], tuple[Any, ...]]
) -> Callable[[Any], Any]:
    """Return a reducer of objects that no process shares with another; only globals go, by their names.

    As a part of an item it is refused, as by pickle: nobody could say what it guards in another process.
    """

    def reduce(obj: Any) -> Any:
        place = _place_of(obj)
        if place is None:
            return obj.__reduce_ex__(5)
        return _global_of, (*place, make, arguments_of(obj))

    return reduce


def _make_event(is_set: bool) -> threading.Event:
    event = threading.Event()
    if is_set:
        event.set()
    return event


def _make_local(attributes: dict[str, Any]) -> threading.local:
    local = threading.local()
    vars(local).update(attributes)
    return local


def _make_semaphore(kind: Any, value: int, initial_value: int) -> Any:
    semaphore = kind(initial_value)
    semaphore._value = value
    return semaphore


def _values_of_context(variable: contextvars.ContextVar[Any]) -> tuple[Any, ...]:
    """Return the name of a context variable, its default and its value, each in a tuple if there is one."""
    default: tuple[Any, ...] = ()
    with contextlib.suppress(LookupError):
        default = (contextvars.Context().run(variable.get),)
    value = tuple(value for other, value in contextvars.copy_context().items() if other is variable)
    return variable.name, default, value


def _make_context_variable(
    name: str, default: tuple[Any, ...], value: tuple[Any, ...]
) -> contextvars.ContextVar[Any]:
    variable: contextvars.ContextVar[Any] = contextvars.ContextVar(name)
    for each in default:
        variable = contextvars.ContextVar(name, default=each)
    for each in value:
        variable.set(each)
    return variable


_REDUCERS: dict[type, Callable[[Any], Any]] = {
    _CachedFunction: _reduce_cached_function,
    functools.cached_property: _reduce_cached_property,
    typing.NewType: _reduce_new_type,
    io.TextIOWrapper: _reduce_file,
    type(threading.Lock()): _as_global(threading.Lock, lambda _: ()),
    type(threading.RLock()): _as_global(threading.RLock, lambda _: ()),
    # Private to threading: test_what_a_script_defines_travels notices the loss of each.
    threading.Event: _as_global(_make_event, lambda event: (event.is_set(),)),
    threading.Semaphore: _as_global(_make_semaphore, lambda s: (threading.Semaphore, s._value, s._value)),
    threading.BoundedSemaphore: _as_global(
        _make_semaphore, lambda s: (threading.BoundedSemaphore, s._value, s._initial_value)
    ),
    threading.Condition: _as_global(threading.Condition, lambda c: (c._lock,) if _place_of(c._lock) else ()),
    threading.Barrier: _as_global(threading.Barrier, lambda b: (b._parties, b._action, b._timeout)),
    threading.local: _as_global(_make_local, lambda local: (dict(vars(local)),)),
    contextvars.ContextVar: _as_global(_make_context_variable, _values_of_context),
}
