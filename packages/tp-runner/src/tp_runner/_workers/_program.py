"""What a worker runs: made from a runner class or a function, pickled with large arrays apart."""

import ctypes
import functools
import io
import pickle
import sys
import types
from collections.abc import Callable
from typing import Any

from tp_runner._cfg import copy_cfg
from tp_runner._workers._pickle_errors import why_not_picklable
from tp_runner.errors import NotPicklableError

__all__ = ["LARGE", "ClassProgram", "FunctionProgram", "dump_program", "dumps_apart", "is_plain_memory"]


class ClassProgram:
    """The producer's side of a runner class.

    Called with its device in each worker, it returns what is applied to each item; the ``close``
    attribute of that is called at the end.

    Attributes:
        is_own: Whether the configuration is nobody else's: in a process of its own it need not be copied.
    """

    def __init__(self, producer: type, cfg: Any) -> None:
        self._producer: Any = producer
        self._cfg = cfg
        self.is_own = False

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, is_own=True)

    def __call__(self, device: str) -> Callable[[Any], Any]:
        """Start: ``producer_init``."""
        cfg = self._cfg if self.is_own else copy_cfg(self._cfg)
        self._producer.producer_init(device, cfg)
        work = functools.partial(self._producer.producer_work, device, cfg)
        work.close = functools.partial(self._producer.producer_end, device, cfg)  # type: ignore[attr-defined]  # partial objects take attributes
        return work


class FunctionProgram:
    """A plain function, and what makes its state."""

    def __init__(self, function: Callable[..., Any], init: Callable[[str], Any] | None) -> None:
        self._function = function
        self._init = init

    def __call__(self, device: str) -> Callable[[Any], Any]:
        """Start: make the state, if there is one."""
        if self._init is None:
            return self._function
        return functools.partial(self._function, self._init(device))


def dump_program(program: Any, buffers: list[memoryview] | None = None) -> bytes:
    """Pickle what a worker runs; what a fresh interpreter could not import goes by value.

    Args:
        program: What it runs.
        buffers: Where to put large arrays and tensors, in order, instead of into the pickle.

    Raises:
        NotPicklableError: Something that it refers to cannot be pickled.
    """
    import cloudpickle

    modules = [module for module in _modules_of(program) if not _importable(module)]
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    try:
        if buffers is None:
            data: bytes = cloudpickle.dumps(program, protocol=5)
        else:
            data = dumps_apart(program, buffers)
    except Exception as error:
        parts = vars(program).values() if hasattr(program, "__dict__") else (program,)
        part = next((part for part in parts if not _dumps(part)), program)
        name = getattr(part, "__qualname__", type(part).__qualname__)
        msg = f"{why_not_picklable(part, name, error)}; it must travel to the workers"
        raise NotPicklableError(msg) from error
    finally:
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)
    return data


def _dumps(part: Any) -> bool:
    import cloudpickle

    try:
        cloudpickle.dumps(part)
    except Exception:  # noqa: BLE001 - a user's __reduce__ may do anything
        return False
    return True


def _modules_of(program: Any) -> list[types.ModuleType]:
    names = {type(program).__module__, getattr(program, "__module__", None)}
    for part in vars(program).values() if hasattr(program, "__dict__") else ():
        names |= {getattr(part, "__module__", None), type(part).__module__}
    found = [sys.modules.get(name) for name in names if name not in {None, "__main__", "builtins"}]
    return [module for module in found if module is not None]


def _importable(module: types.ModuleType) -> bool:
    """Whether a fresh interpreter with our ``sys.path`` would find this very module."""
    ours = getattr(module, "__spec__", None)
    if ours is None or ours.origin in {None, "built-in", "frozen"}:
        return ours is not None
    try:
        parent, _, _ = module.__name__.rpartition(".")
        if parent and parent not in sys.modules:
            return False
        # Past sys.modules, where the module is for sure.
        path = sys.modules[parent].__path__ if parent else None
        for finder in sys.meta_path:
            found = finder.find_spec(module.__name__, path)
            if found is not None:
                return bool(found.origin == ours.origin)
    except (ImportError, AttributeError, ValueError):
        return False
    return False


LARGE = 64 << 10
"""Buffers of at least so many bytes are kept apart."""


def dumps_apart(obj: Any, buffers: list[memoryview]) -> bytes:
    """Pickle an object with cloudpickle; add its large buffers to ``buffers``, in order.

    ``pickle.loads`` undoes it, given buffers that can be written to. Tensors that share their memory
    share it afterwards, too.
    """
    import cloudpickle

    def keep_small(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < LARGE:
            return True
        buffers.append(raw)
        return False

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # it has no types
        dispatch_table = cloudpickle.Pickler.dispatch_table.new_child(_reducers_of_multiprocessing())

    tensor = getattr(sys.modules.get("torch"), "Tensor", None)
    if tensor is not None:
        storages: dict[int, _Storage] = {}
        Pickler.dispatch_table[tensor] = lambda value: _reduce_tensor(value, storages)
    stream = io.BytesIO()
    Pickler(stream, protocol=5, buffer_callback=keep_small).dump(obj)
    return stream.getvalue()


def _reducers_of_multiprocessing() -> dict[type, Any]:
    """Return how its pipes and shared values are pickled; torch adds its tensors there, which are ours."""
    reduction = sys.modules.get("multiprocessing.reduction")
    if reduction is None:
        return {}
    reducers = reduction.ForkingPickler(io.BytesIO()).dispatch_table
    # Those of multiprocessing.reduction itself are of methods and partial objects, as cloudpickle's are.
    ours = {"multiprocessing.connection", "multiprocessing.heap", "multiprocessing.sharedctypes"}
    return {kind: reduce for kind, reduce in reducers.items() if reduce.__module__ in ours}


def is_plain_memory(tensor: Any) -> bool:
    """Whether a tensor is nothing but values in the host's memory, which a view can stand for."""
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
    """The memory of one or more tensors; the pickler meets the same object each time."""

    def __init__(self, storage: Any) -> None:
        self._storage = storage

    def __reduce__(self) -> tuple[Any, ...]:
        nbytes = self._storage.nbytes()
        view = (ctypes.c_char * nbytes).from_address(self._storage.data_ptr())
        view.owner = self._storage  # which must outlive it
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
