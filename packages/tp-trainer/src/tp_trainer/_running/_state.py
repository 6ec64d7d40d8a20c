"""The state of a run as one object, which is captured into checkpoints and restored from them."""

import ctypes
import hashlib
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from tp_core.data import PreparedLoader
from tp_core.errors import ConfigError, StateError
from tp_core.output import get_logger
from tp_core.plugins import Session
from tp_core.random import capture_rng_state, restore_rng_state, seed_device, seed_everything, seed_of
from tp_core.state import (
    SliceBuffer,
    StoredTensors,
    collect_state,
    collect_values,
    fill_from_whole,
    load_whole_state,
    restore_state,
    restore_values,
    slice_of,
    to_json,
)
from tp_core.tensors import TensorSlice, is_dtensor, is_sharded

from tp_trainer._checkpoint import Checkpoints
from tp_trainer._checkpoint._base import (
    Base,
    FrozenWeights,
    base_of,
    check_frozen,
    describe_frozen,
    frozen_weights,
)
from tp_trainer._checkpoint._checkpointer import Checkpointer
from tp_trainer._checks import metrics_hint
from tp_trainer._running._history import EpochRecord
from tp_trainer._steps._meter import Meter, added_states, empty_state
from tp_trainer._steps._optimizer_step import OptimizerStep
from tp_trainer._steps._step import LossScaler

log = get_logger("tp_trainer")

Tensors = dict[str, Tensor | TensorSlice]
Captured = tuple[Tensors, dict[str, Any], dict[str, Any]]
"""A state of a run: tensors that are not copied, values common to all ranks, and this rank's own."""

# -- Further objects that a run saves -------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CapturedUserState:
    """The state of the objects at one moment.

    Attributes:
        common: Plain values that are equal on all ranks, by name.
        own: This rank's plain values, by name, where the ranks differ.
    """

    common: dict[str, Any]
    own: dict[str, Any]
    tensors: Tensors


class UserState:
    """Objects with ``state_dict`` and ``load_state_dict``, and plain values, by name.

    A state that differs between ranks (each has its own replay buffer) is saved for each rank. The state
    of a module counts as equal on all ranks, and rank 0's is saved, unless the module has split parameters.

    Args:
        values: The user's own dict. A restored value replaces one that cannot be changed in place.
        names: The names in it that are saved.
        callbacks: Objects with state that a checkpoint may lack.
        models: The prepared models; what callbacks average is split as their parameters are.
    """

    def __init__(
        self,
        session: Session,
        values: MutableMapping[str, Any],
        names: tuple[str, ...],
        *,
        callbacks: Mapping[str, Any],
        models: Mapping[str, nn.Module],
    ) -> None:
        self._models = models
        self._session = session
        self._values = values
        self._names = names
        self._callbacks = callbacks

    def capture(self) -> CapturedUserState:
        """Return the state of all objects.

        Collectives: over several ranks one gather of digests, and one of the states that differ.
        """
        common: dict[str, Any] = {}
        tensors: Tensors = {}
        collected: dict[str, tuple[Any, Tensors]] = {}
        for name in self._names:
            collected[name] = collect_values(f"state.{name}", self._state_of(name))
        for name in self._callbacks:
            if state := self._state_of(name):
                pairs = self._averages_in(state)
                cuts = {id(a): slice_of(self._session.as_slice, p, a.detach()) for p, a in pairs.values()}
                collected[name] = collect_values(f"state.{name}", state, parts=cuts)
        different = self._different(collected)
        for name, (plain, own) in collected.items():
            if name not in different:
                common[name] = plain
                tensors |= own
        if not different:
            return CapturedUserState(common, {}, tensors)
        rank, own_values = self._session.rank, {}
        for name in sorted(different):
            own_values[name] = collect_values(f"state.{name}@{rank}", self._state_of(name), own=True)
        everyones = self._session.gather_objects(
            [own for _, own in own_values.values()], where="states of ranks"
        )
        for theirs in everyones:
            for own in theirs:
                tensors |= own
        return CapturedUserState(common, {name: plain for name, (plain, _) in own_values.items()}, tensors)

    def restore(
        self, path: Path, stored: StoredTensors, common: Mapping[str, Any], ranks: list[Mapping[str, Any]]
    ) -> None:
        saved = {**common, **ranks[self._session.rank % len(ranks)]}
        lost = sorted(saved.keys() - set(self._names) - self._callbacks.keys())
        if lost:
            log.warning("%s has state of %s, which this run does not keep", path, ", ".join(map(repr, lost)))
        own: set[str] = set().union(*ranks)
        if own and len(ranks) != self._session.world_size and self._session.is_main:
            log.warning(
                "%s has a state of %s for each of %d ranks, and this run has %d: rank r takes that of rank "
                "r %% %d",
                path,
                ", ".join(map(repr, sorted(own))),
                len(ranks),
                self._session.world_size,
                len(ranks),
            )
        missing = next((name for name in self._names if name not in saved), None)
        if missing is not None:
            msg = f"{path} has no state of {missing!r}, which this run keeps; resume with what the run had"
            raise ConfigError(msg)
        for name in self._names:
            # An object moves its state by itself, as torch's optimizers do.
            if _has_state(self._values[name]):
                device = None
            else:
                device = self._session.device
            self._put_back(name, restore_values(saved[name], stored, device))
        for name in self._callbacks:
            # One without a state on this rank was not asked to load one when there was a single rank, either.
            if name in saved and (state := restore_values(saved[name], stored)):
                for of, (parameter, average) in self._averages_in(state).items():
                    place = SliceBuffer(self._session.as_slice, parameter, average.dtype)
                    if place.target.shape == average.shape:  # another one is refused by the callback
                        fill_from_whole(place.target, average)
                        state["averages"][of] = place.take()
                self._put_back(name, state)

    @contextmanager
    def averages(self) -> Iterator[dict[Tensor, dict[str, Any]]]:
        """Yield what callbacks average, by parameter and callback; at the end they get what is there."""
        states = {name: self._state_of(name) for name in self._callbacks}
        kept: dict[Tensor, dict[str, Any]] = {}
        for name, state in states.items():
            for parameter, average in self._averages_in(state).values():
                kept.setdefault(parameter, {})[name] = average
        yield kept
        for name, state in states.items():
            pairs = self._averages_in(state)
            for of, (parameter, _) in pairs.items():
                state["averages"][of] = kept[parameter][name]
            if pairs:
                self._put_back(name, state)

    def _averages_in(self, state: Any) -> dict[str, tuple[Tensor, Tensor]]:
        """Return the parameters that a callback averages, each with its average, by their names."""
        if isinstance(state, dict):
            averages = state.get("averages")
        else:
            averages = None
        if not isinstance(averages, dict) or len(self._models) != 1:
            return {}
        plain = self._session.unwrap(next(iter(self._models.values())))
        # Of a user's own callback they may be anything.
        named = [(n, p, averages.get(n)) for n, p in plain.named_parameters()]
        return {n: (p, average) for n, p, average in named if isinstance(average, Tensor)}

    def _state_of(self, name: str) -> Any:
        if name in self._callbacks:
            value = self._callbacks[name]
        else:
            value = self._values[name]
        if _has_state(value):
            return value.state_dict()
        return value

    def _put_back(self, name: str, state: Any) -> None:
        if name in self._callbacks:
            value = self._callbacks[name]
        else:
            value = self._values[name]
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

    def _different(self, collected: Mapping[str, tuple[Any, Tensors]]) -> set[str]:
        """Return the names of the states that differ between ranks.

        Collectives: over several ranks one gather of digests.
        """
        # The names are equal on all ranks, the states that are found may not be: a callback may have one on
        # rank 0 alone. A rank that skipped this gather for want of any would be answered by the next one.
        if self._session.world_size == 1 or not (self._names or self._callbacks):
            return set()
        digests = {
            name: _digest(plain, tensors)
            for name, (plain, tensors) in collected.items()
            if not isinstance(self._values.get(name), nn.Module)
        }
        everyones = self._session.gather_objects(digests, where="digests of states")
        known: set[str] = set().union(*everyones)
        first, *of_others = everyones
        different = {
            name for name in known if any(theirs.get(name) != first.get(name) for theirs in of_others)
        }
        # A copy of a split model, such as an average of it, has other shards on each rank.
        return different | {name for name in self._names if _is_split(self._values[name])}


def _has_state(value: object) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def _is_split(value: object) -> bool:
    """Return whether a module has shards that no DTensor describes."""
    if not isinstance(value, nn.Module):
        return False
    return any(is_sharded(p) and not is_dtensor(p) for p in value.parameters())


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


# -- Warnings about optimizers that nothing saves ------------------------------------------------


@contextmanager
def unsaved_optimizers(known: Iterable[Optimizer]) -> Iterator[Callable[[], None]]:
    """Record which optimizers step; yield a function that warns, once, of those that nothing saves."""
    ids = {id(optimizer) for optimizer in known}
    unsaved: dict[int, str] = {}

    def note(optimizer: Optimizer, *_: object) -> None:
        if id(optimizer) not in ids:
            unsaved[id(optimizer)] = type(optimizer).__name__

    # A global hook, since nothing else finds an optimizer that was not named. It costs a call in each step,
    # so `warn` removes it at the first checkpoint.
    handle = register_optimizer_step_post_hook(note)

    def warn() -> None:
        handle.remove()
        if unsaved:
            log.warning(
                "the checkpoint has nothing of %s, which steps in this run too: name it and its model in "
                "state={...}, or a resumed run begins with a new one",
                " and ".join(unsaved.values()),
            )
            unsaved.clear()

    try:
        yield warn
    finally:
        handle.remove()


# -- The state of a run ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Trained:
    """Models, optimizers and schedulers of a run, by name.

    Attributes:
        prepared: The models among them that were prepared: ranks hold their parameters in common.
    """

    models: Mapping[str, nn.Module]
    optimizers: Mapping[str, Optimizer]
    schedulers: Mapping[str, Any]
    prepared: Mapping[str, nn.Module]
    scaler: LossScaler | None = None


class RunState:
    """The state of a run: what it trains, what it saves besides, and its position.

    Attributes:
        user_state: Further objects that the run saves.
        epoch: The current or next epoch, from 1.
        first: The batches of this epoch that were done before this call.
        seconds: The seconds that they took.
        meter_state: The sums over them; ``None`` without any.
        logged: This rank's sums of losses and weights when the mean loss was last logged, or ``None``.
        weighs: Whether the step returns a weight; ``None`` before the first step.
        validated_at: The optimizer step of the last validation between two steps.
    """

    def __init__(
        self,
        session: Session,
        trained: Trained,
        user_state: UserState,
        train: PreparedLoader,
        optimizer_step: OptimizerStep | None = None,
        weights: str = "all",
    ) -> None:
        self._session = session
        self.trained = trained
        self.user_state = user_state
        self._train = train
        self._optimizer_step = optimizer_step
        self._weights = weights
        self._restored_base: Base | None = None
        self._frozen: FrozenWeights | None = None
        self.step = 0
        self.epoch = 1
        self.first = 0
        self.seconds = 0.0
        self.meter_state: dict[str, Any] | None = None
        self.logged: tuple[float, float] | None = None
        self.weighs: bool | None = None
        self.records: list[EpochRecord] = []
        self.validated_at = 0
        self.metrics: dict[str, float] = {}

    @property
    def plain_models(self) -> dict[str, nn.Module]:
        return {name: self._session.unwrap(model) for name, model in self.trained.models.items()}

    def _whole_model(self) -> nn.Module:
        """Return the only model, or one module with all models as children, under their names."""
        models = self.plain_models
        if len(models) == 1:
            return next(iter(models.values()))
        whole = nn.Module()
        whole._modules.update(models)
        return whole

    def _optimizers(self) -> Optimizer | Mapping[str, Optimizer]:
        optimizers = self.trained.optimizers
        if len(optimizers) == 1:
            return next(iter(optimizers.values()))
        return optimizers

    def check(self, *, replay: bool) -> None:
        """Make sure that the run can be saved, before training costs anything.

        With ``replay`` a resumed run may read batches again to reach its position.

        Collectives: as in :meth:`capture`.
        """
        if self._weights == "trainable":
            check_frozen(self._whole_model())
        if not replay:
            self._train.check_position()
        _, common, own = self.capture(0, None)
        to_json("the state of the run", (common, own))

    def note_frozen(self) -> str | None:
        """Note the frozen weights that checkpoints leave out; return a text about them, if they are many.

        Collectives: as in `FrozenWeights`, if there are any to leave out.
        """
        model = self._whole_model()
        if self._weights == "trainable":
            self._frozen = FrozenWeights(self._session, model, self._restored_base)
        return describe_frozen(model, self._weights)

    def capture(self, done: int, meter: Meter | None) -> Captured:
        """Return the state after ``done`` batches of the current or next epoch.

        Without ``meter`` the epoch has not begun.

        Collectives: as in `UserState.capture` and `FrozenWeights.base`.
        """
        session, train, trained, step = self._session, self._train, self.trained, self._optimizer_step
        model = self._whole_model()
        base = None
        without: Collection[str] = ()
        if self._frozen is not None:
            base = self._frozen.base(model)
            without = base.weights
        elif self._weights == "trainable":  # before the run: what it will be
            without = frozen_weights(model)
        tensors = collect_state(model, self._optimizers(), cut=session.as_slice, without=without)
        captured = self.user_state.capture()
        schedulers: dict[str, Any] = {}
        for name, scheduler in trained.schedulers.items():
            schedulers[name], own_tensors = collect_values(f"state.scheduler:{name}", _state_of(scheduler))
            tensors |= own_tensors
        if meter is not None and done:
            position = train.state_dict(batches=done)
        else:
            position = train.state_dict(batches=0) | {"epoch": train.next_epoch, "samples": 0}
        common = {
            "epoch": self.epoch,
            "seconds": self.seconds,
            "updates": {
                "count": self.step,
                "skipped": 0 if step is None else step.skipped,
                "unit": None if step is None else step.unit,
            },
            "schedulers": schedulers,
            "scaler": None if trained.scaler is None else trained.scaler.state_dict(),
            "position": position,
            "records": [record.to_dict() for record in self.records],
            "metrics": self.metrics,
            "validated_at": self.validated_at,
            "world_size": session.world_size,
            "base": None if base is None else base.to_plain(),
            "state": captured.common,
        }
        own = {
            "data_rank": session.data_rank,
            "stream": position.pop("stream", None),  # each rank has its own position in its share
            "devices": _device_places(session.job.devices),
            "generators": capture_rng_state(session.job.devices),
            "meter": None if meter is None or not done else meter.state_dict(),
            "logged": self.logged,
            "state": captured.own,
        }
        return {**tensors, **captured.tensors}, common, own

    def restore(
        self, path: Path, stored: tuple[StoredTensors, dict[str, Any], list[dict[str, Any]]], *, replay: bool
    ) -> None:
        """Restore the run from a checkpoint.

        The random generators come last: everything before may draw from them.

        Collectives: as in `Base.check`, if frozen weights were left out.
        """
        tensors, common, ranks = stored
        trained, step = self.trained, self._optimizer_step
        schedulers = _schedulers_in(path, common, trained.schedulers)
        model, base = self._whole_model(), base_of(common)
        if base is not None:
            base.check(self._session, model, path)
        self._restored_base = base
        frozen = () if base is None else base.weights
        restore_state(
            model,
            self._optimizers(),
            tensors,
            cut=self._session.as_slice,
            same_groups=bool(trained.schedulers),
            without=frozen,
        )
        for name, scheduler in trained.schedulers.items():
            _load_state_of(scheduler, restore_values(schedulers[name], tensors))
        if trained.scaler is not None and common["scaler"] is not None:
            trained.scaler.load_state_dict(common["scaler"])
        updates = common["updates"]
        self.step = updates["count"]
        if step is not None:
            step.count, step.skipped, step.unit = updates["count"], updates["skipped"], updates["unit"]
        self.records = [EpochRecord(**record) for record in common["records"]]
        self.metrics, self.validated_at = common.get("metrics", {}), common.get("validated_at", 0)
        self.epoch, self.seconds = common["epoch"], common["seconds"]
        self.user_state.restore(
            path, tensors, common.get("state", {}), [values.get("state", {}) for values in ranks]
        )
        position = common["position"] | {"stream": self._stream_in(ranks)}
        self.first = self._train.load_state_dict(position, replay=replay)
        self._restore_own(path, common, ranks)

    def _stream_in(self, ranks: list[dict[str, Any]]) -> dict[str, Any] | None:
        """Return the position of this rank's share of a stream, or of data rank 0's if it had none."""
        by_rank = {values["data_rank"]: values.get("stream") for values in ranks}
        return by_rank.get(self._session.data_rank, by_rank.get(0))

    def _restore_own(self, path: Path, common: Mapping[str, Any], ranks: list[dict[str, Any]]) -> None:
        session = self._session
        # Not the world size alone: of two ranks, each may read half the data, or both all of it (two stages).
        shares = 1 + max(own["data_rank"] for own in ranks)
        if (common["world_size"], shares) == (session.world_size, session.data_size):
            own = ranks[session.rank]
            self.meter_state, logged = own["meter"], own.get("logged")
            if logged is None:
                self.logged = None
            else:
                self.logged = (logged[0], logged[1])
            self._restore_generators(path, common, own)
            return
        self.meter_state = _share_of_sums(session.data_rank, ranks)
        if session.rank == 0:
            log.warning(
                "%s was saved by %d ranks, and this run has %d (with %d and %d shares of the data): model, "
                "optimizer and position come from the checkpoint, the random generators are seeded again",
                path,
                common["world_size"],
                session.world_size,
                shares,
                session.data_size,
            )
        seed_everything(self._seed_of_resumed(common))

    def _restore_generators(self, path: Path, common: Mapping[str, Any], own: Mapping[str, Any]) -> None:
        session = self._session
        devices = session.job.devices
        for device in restore_rng_state(own["generators"], devices):
            seed_device(device, self._seed_of_resumed(common))
        places = _device_places(devices)
        before = own.get("devices", places)  # earlier versions did not note them
        if before != places and session.rank == 0:
            log.warning(
                "%s was saved on %s, and this run is on %s: what it draws there at random, such as dropout, "
                "differs from what the run would have drawn",
                path,
                ", ".join(before),
                ", ".join(places),
            )

    def _seed_of_resumed(self, common: Mapping[str, Any]) -> int:
        return seed_of((common["position"]["seed"], self.step, self._session.data_rank))


def _device_places(devices: Sequence[torch.device]) -> list[str]:
    """Return the types of devices, each with the first of its places; another host has other numbers."""
    return [d.type if d.type == "cpu" else f"{d.type}:{devices.index(d)}" for d in devices]


def _schedulers_in(path: Path, common: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Return the states of the schedulers that the run has."""
    saved: dict[str, Any] = common.get("schedulers", {})
    if common.get("scheduler") is not None:  # written by a version with a single scheduler
        saved = {"scheduler": common["scheduler"]}
    if len(saved) == len(wanted) == 1:  # whatever they are called
        return dict(zip(wanted, saved.values(), strict=True))
    if bool(saved) != bool(wanted):
        has, lacks = ("the run", "the checkpoint") if wanted else ("the checkpoint", "the run")
        msg = f"{path}: {has} has a scheduler and {lacks} has none; resume with what the run had"
        raise ConfigError(msg)
    if saved.keys() != wanted.keys():
        msg = (
            f"{path} is of a run with the schedulers {sorted(saved)}, and this one has {sorted(wanted)}; "
            "resume with what the run had"
        )
        raise ConfigError(msg)
    return saved


def _share_of_sums(data_rank: int, ranks: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return a rank's part of all ranks' sums: data rank 0 takes everything, the others nothing."""
    # One per data rank: ranks with the same data have each counted all of it.
    shares = {values["data_rank"]: values["meter"] for values in ranks if values["meter"] is not None}
    states = list(shares.values())
    if not states:
        return None
    if data_rank == 0:
        return added_states(states)
    return empty_state(states[0])


def _state_of(scheduler: Any) -> Any:
    if hasattr(scheduler, "state_dict"):
        return scheduler.state_dict()
    return {}


def _load_state_of(scheduler: Any, state: Any) -> None:
    if hasattr(scheduler, "load_state_dict"):
        scheduler.load_state_dict(state)


# -- Checkpoints: when one is due, what it contains, and how a run resumes ------------------------


class Saving:
    """Writes the state of a run into checkpoints, and resumes it."""

    def __init__(self, settings: Checkpoints, session: Session, state: RunState, backend: str) -> None:
        self.checkpointer = Checkpointer(settings, session)
        self._session = session
        self._state = state
        self._backend = backend

    @property
    def last(self) -> Path | None:
        return self.checkpointer.last

    def resume(self, wanted: str | os.PathLike[str] | None) -> bool:
        """Resume from a checkpoint, if there is one; return whether there was.

        Collectives: as in `Checkpointer.find` and `Checkpointer.check_free`.
        """
        checkpointer, state = self.checkpointer, self._state
        path = None if wanted is None else checkpointer.find(wanted)
        if path is not None:
            state.restore(path, checkpointer.read(path), replay=checkpointer.settings.replay)
            checkpointer.continues(path, state.step)
        if wanted != "auto":
            checkpointer.check_free(state.step)
        return path is not None

    def ends_epoch(self, epoch: int) -> bool:
        every = self.checkpointer.settings.every_epochs
        return every is not None and epoch % every == 0

    def capture(self, done: int, meter: Meter | None) -> Captured | None:
        """Return the state after ``done`` batches of the current or next epoch; ``None`` if it is saved.

        Collectives: as in `RunState.capture`.
        """
        if self.checkpointer.has_saved(self._state.step):
            return None
        return self._state.capture(done, meter)

    def write(self, captured: Captured) -> None:
        """Write a captured state into a checkpoint of this step, beside the metrics of now.

        Collectives: as in `Checkpointer.save`.
        """
        state = self._state
        facts = {
            "step": state.step,
            "epoch": state.epoch,
            "backend": self._backend,
            "world_size": self._session.world_size,
            "metrics": dict(state.metrics),
            "versions": _versions(),
        }
        self.checkpointer.save(state.step, *captured, facts)

    def finish(self) -> None:
        """Wait until the checkpoint under way is written.

        Collectives: as in `Checkpointer.finish`.
        """
        self.checkpointer.finish()

    def check_best(self, known: Iterable[str]) -> None:
        """Check that the metrics of the run have the one of the best checkpoint."""
        name = self.checkpointer.settings.best
        if name is not None and name not in known:
            msg = f"best={name!r} is none of the metrics of the run, {metrics_hint(name, known)}"
            raise ConfigError(msg)


@cache
def _versions() -> dict[str, str]:
    return {"torch": torch.__version__, "tp-trainer": version("tp-trainer")}
