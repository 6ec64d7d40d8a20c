"""Further objects that a run saves, and warnings about averages and optimizers that it does not save."""

import ctypes
import functools
import hashlib
import logging
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.optim.swa_utils import AveragedModel
from tp_core.errors import ConfigError, StateError
from tp_core.plugins import Session
from tp_core.state import StoredTensors, collect_values, load_whole_state, restore_values, to_json
from tp_core.tensors import TensorSlice

log = logging.getLogger("tp_trainer")

Tensors = dict[str, Tensor | TensorSlice]


@dataclass(frozen=True, slots=True)
class CapturedUserState:
    """The state of the objects at one moment.

    Attributes:
        common: Plain values that are equal on all ranks, by name.
        own: This rank's plain values, by name, where the ranks differ.
        tensors: The tensors of all states.
    """

    common: dict[str, Any]
    own: dict[str, Any]
    tensors: Tensors


class UserState:
    """Objects with ``state_dict`` and ``load_state_dict``, and plain values, by name.

    A state that differs between ranks (each has its own replay buffer) is saved for each rank. The state
    of a module counts as equal on all ranks, and rank 0's is saved.

    Args:
        session: The session of the ranks.
        values: The user's own dict. A restored value replaces one that cannot be changed in place.
        names: The names in it that are saved.
        callbacks: Objects with state that a checkpoint may lack.
    """

    def __init__(
        self,
        session: Session,
        values: MutableMapping[str, Any],
        names: tuple[str, ...],
        *,
        callbacks: Mapping[str, Any],
    ) -> None:
        self._session = session
        self._values = values
        self._names = names
        self._callbacks = callbacks

    def capture(self) -> CapturedUserState:
        """Return the state of all objects.

        Raises:
            StateError: An object's state has values that checkpoints cannot hold.

        Collectives: over several ranks one gather of digests, and one of the states that differ.
        """
        common: dict[str, Any] = {}
        tensors: Tensors = {}
        found: dict[str, tuple[Any, Tensors]] = {}
        for name in self._names:
            found[name] = collect_values(f"state.{name}", self._state_of(name))
        for name in self._callbacks:
            if state := self._state_of(name):
                found[name] = collect_values(f"state.{name}", state)
        different = self._different(found)
        for name, (plain, own) in found.items():
            if name not in different:
                common[name] = plain
                tensors |= own
        if not different:
            return CapturedUserState(common, {}, tensors)
        rank, mine = self._session.rank, {}
        for name in sorted(different):
            mine[name] = collect_values(f"state.{name}@{rank}", self._state_of(name), own=True)
        for theirs in self._session.gather_objects([own for _, own in mine.values()]):
            for own in theirs:
                tensors |= own
        return CapturedUserState(common, {name: plain for name, (plain, _) in mine.items()}, tensors)

    def restore(
        self, path: Path, stored: StoredTensors, common: Mapping[str, Any], ranks: list[Mapping[str, Any]]
    ) -> None:
        """Restore all objects.

        Args:
            path: The checkpoint, for messages.
            stored: Its tensors.
            common: The values that were equal on all ranks.
            ranks: Each rank's own values.

        Raises:
            ConfigError: The run saves something that the checkpoint lacks.
            StateError: A file is damaged.
        """
        mine = {**common, **ranks[self._session.rank % len(ranks)]}
        lost = sorted(mine.keys() - set(self._names) - self._callbacks.keys())
        if lost:
            log.warning("%s has state of %s, which this run does not keep", path, ", ".join(map(repr, lost)))
        missing = next((name for name in self._names if name not in mine), None)
        if missing is not None:
            msg = f"{path} has no state of {missing!r}, which this run keeps; resume with what the run had"
            raise ConfigError(msg)
        for name in self._names:
            self._put_back(name, restore_values(mine[name], stored))
        for name in self._callbacks:
            # One without a state on this rank was not asked to load one when there was a single rank, either.
            if name in mine and (state := restore_values(mine[name], stored)):
                self._put_back(name, state)

    def _state_of(self, name: str) -> Any:
        value = self._callbacks[name] if name in self._callbacks else self._values[name]
        return value.state_dict() if _has_state(value) else value

    def _put_back(self, name: str, state: Any) -> None:
        value = self._callbacks[name] if name in self._callbacks else self._values[name]
        if _has_state(value):
            try:
                if isinstance(value, nn.Module):  # its parameters may be DTensors
                    load_whole_state(value, state)
                else:
                    value.load_state_dict(state)
            except Exception as error:
                msg = f"the state of {name!r} could not be put back into {type(value).__name__}: {error}"
                raise StateError(msg) from error
        elif isinstance(value, Tensor) and isinstance(state, Tensor) and value.shape == state.shape:
            with torch.no_grad():
                value.copy_(state)
        elif isinstance(value, list) and isinstance(state, list):
            value[:] = state
        elif isinstance(value, dict) and isinstance(state, dict):
            value.clear()
            value.update(state)
        else:
            self._values[name] = state

    def _different(self, found: Mapping[str, tuple[Any, Tensors]]) -> set[str]:
        """Return the names of the states that differ between ranks.

        Collectives: over several ranks one gather of digests.
        """
        # The names are equal on all ranks, the states that are found may not be: a callback may have one on
        # rank 0 alone. A rank that skipped this gather for want of any would be answered by the next one.
        if self._session.world_size == 1 or not (self._names or self._callbacks):
            return set()
        digests = {
            name: _digest(plain, tensors)
            for name, (plain, tensors) in found.items()
            if not isinstance(self._values.get(name), nn.Module)
        }
        everyones = self._session.gather_objects(digests)
        known = {name for theirs in everyones for name in theirs}
        return {name for name in known if len({theirs.get(name) for theirs in everyones}) > 1}


def _has_state(value: object) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def _digest(plain: Any, tensors: Mapping[str, Tensor | TensorSlice]) -> str:
    digest = hashlib.blake2b(to_json("state", plain).encode(), digest_size=16)
    for name, tensor in tensors.items():
        if isinstance(tensor, TensorSlice):  # ranks hold different slices of one tensor
            digest.update(f"{name} {tuple(tensor.shape)}".encode())
            continue
        host = tensor.detach().to("cpu").contiguous()
        digest.update(f"{name} {host.dtype} {tuple(host.shape)}".encode())
        if host.numel():  # by ctypes: numpy may not be installed
            digest.update((ctypes.c_char * host.nbytes).from_address(host.data_ptr()))
    return digest.hexdigest()


def unsaved_averages(optimizers: Iterable[Optimizer], saved: Iterable[object]) -> list[str]:
    """Return a text about each weight average that an optimizer's hook updates and nothing saves.

    Args:
        optimizers: The optimizers of the run.
        saved: The objects that the run saves.
    """
    known = {id(value) for value in saved}
    known |= {id(m) for value in saved if isinstance(value, nn.Module) for m in value.modules()}
    found = {}
    for optimizer in optimizers:
        # Private: torch has no public list of an optimizer's hooks.
        for hook in [
            *optimizer._optimizer_step_post_hooks.values(),
            *optimizer._optimizer_step_pre_hooks.values(),
        ]:
            for value in _reached(hook):
                if isinstance(value, AveragedModel) and id(value) not in known:
                    found[id(value)] = (
                        f"an {type(value).__name__} that a hook of {type(optimizer).__name__} updates"
                    )
    return list(found.values())


def _reached(hook: Callable[..., Any]) -> Iterator[Any]:
    """Yield the objects that a function can reach: its closure, defaults, owner and globals."""
    if isinstance(hook, functools.partial):
        yield from [*hook.args, *hook.keywords.values()]
        yield from _reached(hook.func)
    elif isinstance(hook, types.MethodType):
        yield hook.__self__
        yield from _reached(hook.__func__)
    elif isinstance(hook, types.FunctionType):
        yield from hook.__defaults__ or ()
        for cell in hook.__closure__ or ():
            try:
                yield cell.cell_contents
            except ValueError:  # not bound yet
                continue
        yield from (hook.__globals__[name] for name in hook.__code__.co_names if name in hook.__globals__)


@contextmanager
def unsaved_optimizers(known: Iterable[Optimizer]) -> Iterator[Callable[[], None]]:
    """Record which optimizers step; yield a function that warns, once, of those that nothing saves."""
    ids = {id(optimizer) for optimizer in known}
    others: dict[int, str] = {}

    def note(optimizer: Optimizer, *_: object) -> None:
        if id(optimizer) not in ids:
            others[id(optimizer)] = type(optimizer).__name__

    # A global hook, since nothing else finds an optimizer that was not named. It costs a call in each step,
    # so `warn` removes it at the first checkpoint.
    handle = register_optimizer_step_post_hook(note)

    def warn() -> None:
        handle.remove()
        if others:
            log.warning(
                "the checkpoint has nothing of %s, which steps in this run too: name it and its model in "
                "state={...}, or a resumed run begins with a new one",
                " and ".join(others.values()),
            )
            others.clear()

    try:
        yield warn
    finally:
        handle.remove()
