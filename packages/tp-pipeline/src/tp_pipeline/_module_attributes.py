"""What a forward pass keeps on modules as attributes: it shows in a dry run, which leaves no trace of it."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from tp_core import tree_leaves

_OF_TORCH = frozenset(vars(nn.Module()))
_SEQUENCES = (list, deque)


class ModuleAttributes:
    """The attributes of a model's modules at one moment: numbers, tensors, generators, containers of these.

    Args:
        model: The model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._before: list[tuple[str, nn.Module, dict[str, tuple[Any, Any]]]] = []
        for prefix, module in model.named_modules():
            copies = {key: (value, _copy_of(value)) for key, value in _attributes_of(module)}
            self._before.append((prefix, module, copies))

    def tensors(self) -> Iterator[Tensor]:
        """Yield the tensors that the modules had then."""
        for _, _, copies in self._before:
            for value, _ in copies.values():
                yield from filter(_has_numbers, tree_leaves(value))

    def changed(self, is_kept: Callable[[Tensor], bool], is_written: Callable[[Tensor], bool]) -> list[str]:
        """Return the names of the attributes that have changed since.

        Args:
            is_kept: Whether a new tensor follows from the batch, blocks or what was kept before; a table that
                forward makes anew, of positions or of weights, does not.
            is_written: Whether an operator has written a tensor in place.
        """
        changed = []
        for prefix, module, copies in self._before:
            for key, now in _attributes_of(module):
                if key in copies:
                    value, copied = copies[key]
                    is_changed = _has_changed(value, copied, now, is_kept, is_written)
                else:
                    is_changed = any(map(is_kept, filter(_has_numbers, tree_leaves(now))))
                if is_changed:
                    changed.append(f"{prefix}.{key}".lstrip("."))
        return changed

    def restore(self) -> None:
        """Put the attributes back as they were, and what is in them."""
        for _, module, copies in self._before:
            attributes = vars(module)
            for key in [key for key, _ in _attributes_of(module) if key not in copies]:
                del attributes[key]
            for key, (value, copied) in copies.items():
                _put_back(value, copied)
                attributes[key] = value


def _attributes_of(module: nn.Module) -> Iterable[tuple[str, Any]]:
    return [(key, value) for key, value in vars(module).items() if key not in _OF_TORCH]


def _has_numbers(value: Any) -> bool:
    """Return whether a value is a tensor with memory of its own: no parameter, as in a list of an LSTM."""
    if not isinstance(value, Tensor) or isinstance(value, nn.Parameter):
        return False
    return value.layout is torch.strided and not value.is_meta


def _copy_of(value: Any) -> Any:
    """Return what shows a change within a value, and undoes it; ``None`` where nothing is looked into."""
    if _has_numbers(value):
        return value.detach().clone()
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, _SEQUENCES):
        return [(item, _copy_of(item)) for item in value]
    if isinstance(value, dict):
        return {key: (item, _copy_of(item)) for key, item in value.items()}
    return None


@torch.no_grad()
def _put_back(value: Any, copied: Any) -> None:
    if copied is None:
        return
    if isinstance(value, Tensor):
        if not torch.equal(value, copied):
            value.detach().copy_(copied)
    elif isinstance(value, torch.Generator):
        value.set_state(copied)
    elif isinstance(value, dict):
        value.clear()
        value.update({key: item for key, (item, _) in copied.items()})
        for item, copied_item in copied.values():
            _put_back(item, copied_item)
    else:
        value.clear()
        value.extend(item for item, _ in copied)
        for item, copied_item in copied:
            _put_back(item, copied_item)


def _has_changed(
    value: Any,
    copied: Any,
    now: Any,
    is_kept: Callable[[Tensor], bool],
    is_written: Callable[[Tensor], bool],
) -> bool:
    """Return whether a value, of which there is a copy, has another one in its place or in it now."""
    if isinstance(now, Tensor):
        if not _has_numbers(now):
            return False
        if now is value:
            return is_written(now)
        return is_kept(now)
    if isinstance(now, torch.Generator):
        return now is not value or not torch.equal(now.get_state(), copied)
    if isinstance(now, _SEQUENCES) and isinstance(value, _SEQUENCES):
        before = dict(enumerate(copied))
        items = dict(enumerate(now))
    elif isinstance(now, dict) and isinstance(value, dict):
        before, items = copied, now
    else:
        tensors = filter(_has_numbers, tree_leaves(now))
        is_plain = isinstance(now, bool | int | float | str)
        return any(map(is_kept, tensors)) or (is_plain and isinstance(value, type(now)) and now != value)
    if before.keys() - items.keys():
        return True
    for key, item in items.items():
        if key in before:
            old, copied_item = before[key]
            if _has_changed(old, copied_item, item, is_kept, is_written):
                return True
        elif not isinstance(item, Tensor) or is_kept(item):
            return True
    return False
