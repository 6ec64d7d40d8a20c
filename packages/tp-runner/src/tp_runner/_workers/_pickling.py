"""The pickling of programs, with large arrays apart; the search for a part that cannot be pickled."""

import contextlib
import io
import pickle
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tp_core.ranks import dumps_by_value, pickled_by_value

from tp_runner._workers._failure import ENDING, RESULT, Failure

USERS_ERRORS = (Exception, SystemExit, GeneratorExit)
"""Errors of a user's ``__reduce__`` or ``__setstate__``; an interrupt is for the whole program."""


def dump_program(program: Any, buffers: list[memoryview] | None = None) -> bytes:
    """Pickle a worker's program; modules that a fresh interpreter could not import go by value."""
    modules = [module for module in _modules_of(program) if not _importable(module)]
    try:
        with pickled_by_value(modules):
            if buffers is None:
                return dumps_by_value(program, protocol=5)
            return dumps_out_of_band(program, buffers)
    except USERS_ERRORS as error:
        if hasattr(program, "__dict__"):
            parts = vars(program).values()
        else:
            parts = (program,)
        part = next((part for part in parts if not _can_be_pickled(part)), program)
        name = getattr(part, "__qualname__", type(part).__qualname__)
        msg = (
            f"{explain_not_picklable(part, name, error)}; it must travel to the workers: make it there, in "
            "init= or producer_init, or move what uses it into a module, which they import"
        )
        from tp_runner.errors import NotPicklableError  # as in _work: workers import this module, too

        raise NotPicklableError(msg) from error


def _modules_of(program: Any) -> list[types.ModuleType]:
    """Return the modules of a program, of its attributes, and of their classes."""
    names: set[str | None] = set()
    for part in (program, *getattr(program, "__dict__", {}).values()):
        names |= {type(part).__module__, getattr(part, "__module__", None)}
    names -= {None, "__main__", "builtins"}
    modules = [sys.modules.get(name) for name in names if name is not None]
    return [module for module in modules if module is not None]


def _importable(module: types.ModuleType) -> bool:
    """Return whether a fresh interpreter with our ``sys.path`` would find this very module."""
    ours = getattr(module, "__spec__", None)
    if ours is None or ours.origin in {None, "built-in", "frozen"}:
        return ours is not None
    try:
        parent, _, _ = module.__name__.rpartition(".")
        if parent and parent not in sys.modules:
            return False
        # Not by importlib.util.find_spec, which would find the module in sys.modules.
        path = sys.modules[parent].__path__ if parent else None
        for finder in sys.meta_path:
            spec = finder.find_spec(module.__name__, path)
            if spec is not None:
                return bool(spec.origin == ours.origin)
    except (ImportError, AttributeError, ValueError):
        return False
    return False


LARGE = 64 << 10
"""Buffers of at least this many bytes are kept apart."""


def large_buffers_into(buffers: list[memoryview], large: int) -> Callable[[pickle.PickleBuffer], bool]:
    """Return a pickler's callback that puts buffers of ``large`` bytes into a list."""

    def keep_small(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < large:
            return True
        buffers.append(raw)
        return False

    return keep_small


def dumps_out_of_band(obj: Any, buffers: list[memoryview]) -> bytes:
    """Pickle an object with cloudpickle; add its large buffers to ``buffers``, in order.

    ``pickle.loads`` undoes it, given buffers that can be written to. Tensors that share their memory
    share it afterwards, too.
    """
    reducers = _reducers_of_multiprocessing()
    tensor = getattr(sys.modules.get("torch"), "Tensor", None)
    if tensor is not None:
        storages: dict[int, _Storage] = {}
        reducers[tensor] = lambda value: _reduce_tensor(value, storages)
    keep = large_buffers_into(buffers, LARGE)
    return dumps_by_value(obj, reducers=reducers, protocol=5, buffer_callback=keep)


def _reducers_of_multiprocessing() -> dict[type, Any]:
    """Return multiprocessing's reducers of pipes and shared values, without torch's reducers of tensors."""
    reduction = sys.modules.get("multiprocessing.reduction")
    if reduction is None:
        return {}
    reducers = reduction.ForkingPickler(io.BytesIO()).dispatch_table
    # Those of multiprocessing.reduction are for methods and partial objects, which cloudpickle handles.
    ours = {"multiprocessing.connection", "multiprocessing.heap", "multiprocessing.sharedctypes"}
    return {kind: reduce for kind, reduce in reducers.items() if reduce.__module__ in ours}


def is_plain_memory(tensor: Any) -> bool:
    """Return whether a view of the host's memory can stand for a tensor."""
    import torch

    return (
        tensor.is_cpu
        and tensor.layout is torch.strided
        and not tensor.requires_grad
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not vars(tensor)  # attributes of its own
    )


class _Storage:
    """The memory of one or more tensors: one object for all, so that the pickler writes it once."""

    def __init__(self, storage: Any) -> None:
        self._storage = storage

    def __reduce__(self) -> tuple[Any, ...]:
        nbytes = self._storage.nbytes()
        import ctypes  # torch has imported it

        view = (ctypes.c_char * nbytes).from_address(self._storage.data_ptr())
        view.owner = self._storage  # it must outlive the view
        return _rebuild_storage, (pickle.PickleBuffer(view),)


def _reduce_tensor(tensor: Any, storages: dict[int, _Storage]) -> Any:
    if not is_plain_memory(tensor) or tensor.untyped_storage().nbytes() < LARGE:
        return tensor.__reduce_ex__(5)
    storage = tensor.untyped_storage()
    key = storage.data_ptr()
    holder = storages.get(key) or storages.setdefault(key, _Storage(storage))
    place = tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
    return _rebuild_tensor, (holder, tensor.dtype, *place)


def _rebuild_storage(buffer: Any) -> Any:
    import torch

    return torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()


def _rebuild_tensor(storage: Any, dtype: Any, offset: int, shape: Any, stride: Any) -> Any:
    import torch

    return torch.empty(0, dtype=dtype).set_(storage, offset, shape, stride)


_DEEPEST = 12  # levels of an object that find_culprit visits
_MOST_CHILDREN = 1000  # parts that it tries in each of them


def explain_not_picklable(obj: Any, name: str, error: BaseException) -> str:
    """Return a sentence that names the part of ``obj`` that cannot be pickled."""
    path, culprit = find_culprit(obj, name)
    cause = f"{type(error).__name__}: {error}"
    if path == name:
        where = ""
    else:
        where = f", because of {path} ({_type_name(culprit)})"
    return f"{name} of type {_type_name(obj)} cannot be pickled{where}: {cause}"


def find_culprit(obj: Any, name: str) -> tuple[str, Any]:
    """Return the path to the innermost part of ``obj`` that cannot be pickled, and that part."""
    seen = {id(obj)}
    path = name
    culprit = obj
    for _ in range(_DEEPEST):
        for step, child in _children(culprit):
            if id(child) not in seen and not _can_be_pickled(child):
                seen.add(id(child))
                path += step
                culprit = child
                break
        else:
            break
    return path, culprit


def pack_results(
    results: list[Any], packer: Callable[[Any], tuple[bytes, list[memoryview]]]
) -> tuple[bytes, list[memoryview], bool]:
    """Pack results; replace each one that cannot be packed by a failure.

    Returns:
        The pickle, the large buffers, whether there are such failures.
    """
    with contextlib.suppress(*USERS_ERRORS):  # below, each one is tried alone
        return *packer(results), False
    for place, result in enumerate(results):
        try:
            packer(result)
        except USERS_ERRORS as error:
            results[place] = Failure.of(error, RESULT)
            results[place].summary = explain_not_picklable(result, "result", error)
    return *packer(results), True


def dumps_exit_result(returned: Any) -> bytes:
    """Pickle the value that the end of a worker returned, or why it cannot be pickled."""
    if returned is None:  # as a rule
        return b""
    try:
        data = dumps_by_value(returned, protocol=5)
    except USERS_ERRORS as error:
        failure = Failure.of(error, ENDING)
        failure.summary = explain_not_picklable(returned, "what it returned", error)
        return pickle.dumps(failure, 5)
    return data


def loads_exit_result(data: Any) -> Any:
    """Undo :func:`dumps_exit_result`; return a :class:`Failure` where that is not possible."""
    try:
        if data:
            return pickle.loads(data)
        return None
    except USERS_ERRORS as error:
        return Failure.of(error, ENDING)


def short_repr(obj: Any, limit: int = 200) -> str:
    """Return the ``repr`` of an object in at most ``limit`` characters; never raise."""
    try:
        text = repr(obj)
    except Exception as error:  # noqa: BLE001 - a user's __repr__ may do anything
        text = f"<{_type_name(obj)}: its repr raised {type(error).__name__}>"
    if len(text) > limit:
        return text[: limit - 3] + "..."
    return text


def _can_be_pickled(obj: Any) -> bool:
    try:
        dumps_by_value(obj)
    except USERS_ERRORS:
        return False
    return True


def _children(obj: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(obj, staticmethod | classmethod):
        obj = obj.__func__
    if isinstance(obj, Mapping):
        parts = [(f"[{short_repr(key, 40)}]", value) for key, value in obj.items()]
    elif isinstance(obj, list | tuple):
        parts = [(f"[{place}]", value) for place, value in enumerate(obj)]
    elif isinstance(function := getattr(obj, "__func__", obj), types.FunctionType):
        # As cloudpickle does: what a function holds is pickled with it, and may be what cannot be.
        names = function.__code__.co_freevars
        cells = [cell.cell_contents for cell in function.__closure__ or ()]
        parts = [(f".<closure {name}>", value) for name, value in zip(names, cells, strict=True)]
        used: set[str] = set()
        if not hasattr(obj, "_torchdynamo_orig_callable"):  # torch's own are not the reason
            used = function.__globals__.keys() & function.__code__.co_names
        parts += [(f".<global {name}>", function.__globals__[name]) for name in sorted(used)]
    else:
        parts = []
    if not isinstance(obj, type):
        parts += [(f".{key}", value) for key, value in getattr(obj, "__dict__", {}).items()]
        for kind in type(obj).__mro__:
            slots = kind.__dict__.get("__slots__", ())
            if isinstance(slots, str):
                slots = (slots,)
            for slot in slots:
                if hasattr(obj, slot) and not slot.startswith("__"):
                    parts.append((f".{slot}", getattr(obj, slot)))
    else:
        parts += [(f".{key}", value) for key, value in vars(obj).items() if not key.startswith("__")]
    yield from parts[:_MOST_CHILDREN]


def _type_name(obj: Any) -> str:
    kind = type(obj)
    if kind.__module__ == "builtins":
        return kind.__qualname__
    return f"{kind.__module__}.{kind.__qualname__}"
