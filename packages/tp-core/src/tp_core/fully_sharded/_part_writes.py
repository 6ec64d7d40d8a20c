"""Writes into parts of sharded tensors: ``weight[:6] = values``, ``weight.grad[0].zero_()``.

On one device such a part is a view. torch gathers a DTensor to make it, so that it is a view of a gathered
copy, and what is written is lost with that copy, without a word::

    weight[:6]          whole = all-gather of the shards; whole[:6]
    weight[:6] *= 2     the same, times 2: the shards stay as they are

Here each rank writes into the whole tensor, and keeps its own rows of it. It holds for all DTensors that are
split: parameters, their ``data``, gradients and states of optimizers. How a function of torch has made a part
(``torch.select(weight, 0, 1)``) is not known, and a write into that one is refused.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tp_core._trees import tree_leaves, tree_map
from tp_core.errors import StepError
from tp_core.state import fill_from_whole, whole

_VIEWS = (
    "__getitem__",
    "chunk",
    "diagonal",
    "dsplit",
    "flatten",
    "hsplit",
    "narrow",
    "reshape",
    "select",
    "split",
    "split_with_sizes",
    "tensor_split",
    "view",
    "vsplit",
)
"""The methods that gather for a view of a part, and do not refuse it, as ``unbind`` does."""
_AUGMENTED = frozenset(f"__i{n}__" for n in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"))
_AUGMENTED |= frozenset(f"__i{n}__" for n in ("and", "or", "xor", "lshift", "rshift"))
_OF_NO_VALUES = {"detach_", "rename_", "requires_grad_", "share_memory_"}
_WRITES = _AUGMENTED | {
    name
    for name in dir(Tensor)
    if name.endswith("_") and not name.startswith("_") and name not in _OF_NO_VALUES
}
"""The methods that write their tensor."""


def carry_part_writes() -> None:
    """Make DTensors carry writes into their parts, from now on in this process.

    Their class gets methods of its own, as operators look theirs up there.
    """
    if "__setitem__" in vars(DTensor):
        return
    for name in _VIEWS:
        setattr(DTensor, name, _view_method(name))
    for name in _WRITES:
        setattr(DTensor, name, _writing_method(name))
    DTensor.__setitem__ = _set_item  # type: ignore[method-assign]


@dataclass(frozen=True, slots=True)
class _Source:
    """Where a part comes from: its tensor, and the function that takes the part of a whole one."""

    tensor: DTensor
    take: Callable[[Tensor], Tensor]


class PartOfShards(DTensor):
    """A part of a split tensor, as a view of a gathered copy; what is written here is written there, too.

    Collective: for each write an all-gather of the split tensor.
    """

    _tp_source: _Source

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        part = _written_part(func, args, kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            if part is not None:
                return _write(func, args, kwargs, part)
            result = func(*args, **kwargs)
            viewed = args[0] if args else None
            if type(viewed) is cls:
                _mark(result, viewed, functools.partial(_call, func, args[1:], kwargs))
        return result


def _call(func: Any, args: Sequence[Any], kwargs: Any, tensor: Tensor) -> Any:
    return func(tensor, *args, **kwargs)


def _view_method(name: str) -> Callable[..., Any]:
    plain = getattr(Tensor, name)

    @functools.wraps(plain)
    def view(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = plain(self, *args, **kwargs)
        # A part of a part comes from `PartOfShards`. With gradients torch refuses to write views of leaves.
        if type(self) is not PartOfShards and _is_written(self):
            _mark(result, self, functools.partial(_call, plain, args, kwargs))
        return result

    return view


def _writing_method(name: str) -> Callable[..., Any]:
    plain = getattr(Tensor, name)

    @functools.wraps(plain)
    def write(self: Any, *args: Any, **kwargs: Any) -> Any:
        _check_kept(self, name)
        return plain(self, *args, **kwargs)

    return write


def _check_kept(tensor: Any, name: str) -> None:
    """Check that a tensor is no view of a gathered copy of which it is not known what part it is.

    Raises:
        StepError: It is, and what is written into it would be lost.
    """
    if type(tensor) is PartOfShards or torch.compiler.is_compiling() or not tensor._is_view():
        return
    base = tensor._base
    if torch.is_grad_enabled() and base.requires_grad and base.is_leaf:  # torch refuses it
        return
    if isinstance(base, DTensor) and _storage(base) != _storage(tensor):
        msg = (
            f"{name} writes a part of a sharded tensor that a function of torch has made (torch.select, "
            "torch.narrow, torch.diagonal), a view of a gathered copy, and what is written would be lost; "
            "make it by a method, weight.select(0, 1), or by weight[1]"
        )
        raise StepError(msg)


def _set_item(self: Any, key: Any, value: Any) -> None:
    _check_kept(self, "an assignment")
    if type(self) is PartOfShards or not _is_written(self):
        Tensor.__setitem__(self, key, value)
        return
    _write_whole(self, lambda full: Tensor.__setitem__(full, _whole_values(key), _whole_values(value)))


def _is_written(tensor: DTensor) -> bool:
    """Return whether what is written into views of a tensor is to be carried."""
    if torch.compiler.is_compiling() or (torch.is_grad_enabled() and tensor.requires_grad):
        return False
    placements = tensor.placements
    return any(p.is_shard() for p in placements) and not any(p.is_partial() for p in placements)


def _mark(result: Any, viewed: DTensor, take: Callable[[Tensor], Any]) -> None:
    """Make the tensors of a result parts of a split tensor, if they are views of a gathered copy of it."""
    several = isinstance(result, tuple | list)
    views = result if several else [result]
    for number, view in enumerate(views):
        if type(view) is not DTensor:
            continue
        shares = _storage(view) == _storage(viewed)
        if type(viewed) is PartOfShards:
            if not shares:
                continue
            tensor, take_viewed = viewed._tp_source.tensor, viewed._tp_source.take
        else:
            if shares or not view._is_view():
                continue
            tensor, take_viewed = viewed, None

        def take_this(
            full: Tensor,
            before: Callable[[Tensor], Tensor] | None = take_viewed,
            at: int | None = number if several else None,
        ) -> Tensor:
            if before is not None:
                full = before(full)
            taken: Any = take(full)
            part: Tensor = taken if at is None else taken[at]
            return part

        view.__class__ = PartOfShards
        view._tp_source = _Source(tensor, take_this)  # type: ignore[attr-defined]  # of its new class


def _storage(tensor: DTensor) -> int:
    # Private to torch: `to_local` makes a view where there are gradients.
    address: int = tensor._local_tensor.untyped_storage()._cdata
    return address


def _written_part(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> PartOfShards | None:
    """Return the part that a function writes, if it writes one.

    Raises:
        StepError: It writes several tensors at once.
    """
    name = getattr(func, "__name__", "")
    if "out" in kwargs:
        written = kwargs["out"]
    elif name == "__setitem__" or name in _AUGMENTED or (name.endswith("_") and not name.endswith("__")):
        # Functions of torch.nn.init name their tensor.
        written = args[0] if args else kwargs.get("tensor")
    else:
        return None
    if isinstance(written, tuple | list) and any(type(leaf) is PartOfShards for leaf in tree_leaves(written)):
        msg = (
            f"{name} writes several tensors at once, and one of them is a part of a fully sharded tensor, a "
            "view of a gathered copy; write one after the other, or take the backend 'ddp', with whole "
            "parameters on each rank"
        )
        raise StepError(msg)
    if type(written) is PartOfShards:
        return written
    return None


def _write(func: Any, args: Sequence[Any], kwargs: dict[str, Any], part: PartOfShards) -> Any:
    """Call a function that writes a part, on the whole tensor's part in its place."""
    source = part._tp_source
    if torch.is_grad_enabled() and source.tensor.requires_grad:
        return func(*args, **kwargs)  # torch's own error

    def write(full: Tensor) -> Any:
        view = source.take(full)
        with_view = [
            tree_map(lambda leaf: view if leaf is part else _whole_values(leaf), value)
            for value in (list(args), kwargs)
        ]
        result = func(*with_view[0], **with_view[1])
        fill_from_whole(part, view)
        if result is view:
            return part
        return result

    return _write_whole(source.tensor, write)


@torch.no_grad()
def _write_whole(tensor: DTensor, write: Callable[[Tensor], Any]) -> Any:
    """Call ``write`` with the whole of a split tensor, and keep this rank's part of what it wrote.

    Collective: an all-gather.
    """
    full = whole(tensor.detach())
    result = write(full)
    fill_from_whole(tensor.detach(), full)
    return result


def _whole_values(value: Any) -> Any:
    """Return a nested value with whole tensors in place of DTensors.

    Collective: an all-gather of each DTensor.
    """
    return tree_map(lambda leaf: whole(leaf.detach()) if isinstance(leaf, DTensor) else leaf, value)
