"""An optimizer's state by the names of the parameters, and not by the order in which they came."""

import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from tp_core.errors import ConfigError, ModelError, StateError
from tp_core.modules._parameters import named_parameters
from tp_core.state._plain import Get, Put, joined, split, tensors_in

# -- An optimizer's state by the names of the parameters, and not by the order in which they came
# ``torch.optim.Optimizer.state_dict`` numbers parameters. Made again from the same parameters in another
# order, an optimizer would take the momentum of one layer for another's.


_PARAMETERS = frozenset({"params", "param_names"})
"""Keys of a group that name its parameters, rather than how they are optimized."""
_OF_SCHEDULERS = frozenset({"initial_lr"})
"""Keys that a scheduler adds to a group."""


@dataclass(frozen=True, slots=True)
class OptimizerValues:
    """The plain values of an optimizer's state, with references in place of tensors.

    Attributes:
        groups: The names of the parameters of each group, and its settings.
        state: The state of each parameter, by its name.
        others: The state under other keys, as pairs.
        extra: Further entries of ``state_dict()``, by key.
        in_order: Whether some state belongs to all parameters at once, in their order.
        quantized: Which stored tensors are of a quantized type, and whether that type has negative values.
    """

    groups: list[dict[str, Any]]
    state: dict[str, Any]
    others: list[list[Any]]
    extra: dict[str, Any]
    in_order: bool
    quantized: dict[str, bool] = field(default_factory=dict)


def is_zero_redundancy(optimizer: Optimizer) -> bool:
    """Return whether an optimizer is a ``ZeroRedundancyOptimizer``, without importing that."""
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    return module is not None and isinstance(optimizer, module.ZeroRedundancyOptimizer)


_STEP = f"{Optimizer.profile_hook_step.__qualname__}.<locals>.wrapper"

_Hook: TypeAlias = Callable[[Optimizer, tuple[Any, ...], dict[str, Any]], None]

_stepping_whole: "weakref.WeakSet[Optimizer]" = weakref.WeakSet()


def note_whole_steps(optimizer: Optimizer) -> None:
    """Note that an optimizer steps gathered parameters: state of another shape than they have is whole."""
    _stepping_whole.add(optimizer)


def steps_whole(optimizer: Optimizer) -> bool:
    return optimizer in _stepping_whole


def hook_steps(
    optimizer: Optimizer, *, before: _Hook | None = None, after: _Hook | None = None
) -> list[RemovableHandle]:
    """Register hooks before and after the steps of an optimizer, once for each step.

    A class may call the ``step`` of its base within its own. As soon as anybody has made an object of that
    base, torch calls all hooks for the inner step, too.
    """

    def outermost(hook: _Hook) -> _Hook:
        def run(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not is_inner_step(optimizer):
                hook(optimizer, args, kwargs)

        return run

    handles = []
    if before is not None:
        handles.append(optimizer.register_step_pre_hook(outermost(before)))
    if after is not None:
        handles.append(optimizer.register_step_post_hook(outermost(after)))
    return handles


def is_inner_step(optimizer: Optimizer) -> bool:
    """Return whether a hook is called for a step within another step of the same optimizer."""
    # From the stack, where torch's wrapper is that calls the hooks. It passes them nothing of its call, and
    # calls none after a step that raises: a count of steps begun would be one too many from then on.
    frame: FrameType | None = sys._getframe(1)
    steps = 0
    while frame is not None and steps < 2:
        steps += frame.f_code.co_qualname == _STEP and frame.f_locals["self"] is optimizer
        frame = frame.f_back
    return steps == 2


def check_optimizer(optimizer: Optimizer) -> None:
    if is_zero_redundancy(optimizer):
        msg = (
            "the state of ZeroRedundancyOptimizer cannot be saved in a checkpoint: each rank keeps the state "
            "of its own parameters; take the optimizer that it wraps (its optimizer_class), or a "
            "backend that splits parameters and state, or train without checkpoint="
        )
        raise ConfigError(msg)


def optimizer_names(model: nn.Module, optimizer: Optimizer) -> list[list[str]]:
    """Return the plain names of the optimizer's parameters, in its groups and order.

    Raises:
        ModelError: A parameter is not the model's.
    """
    names: dict[int, str] = {}
    for name, parameter in named_parameters(model).items():
        names.setdefault(id(parameter), name)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    foreign = next((p for p in parameters if id(p) not in names), None)
    if foreign is not None:
        msg = (
            f"the optimizer has a parameter of shape {tuple(foreign.shape)} that is not the model's; make "
            "it from model.parameters(), after the model was converted"
        )
        raise ModelError(msg)
    return [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]


def named_state(model: nn.Module, optimizer: Optimizer, put: Put) -> OptimizerValues:
    """Return an optimizer's state by names; ``put`` gets its tensors."""
    check_optimizer(optimizer)
    names = optimizer_names(model, optimizer)
    packed = optimizer.state_dict()
    keys = [key for group in packed["param_groups"] for key in group["params"]]
    flat = [name for group in names for name in group]
    owners = dict(zip(keys, zip(flat, _parameters(optimizer), strict=True), strict=True))
    total = sum(p.numel() for p in _parameters(optimizer))
    in_order = False
    state: dict[str, Any] = {}
    extras: list[list[Any]] = []
    for key, value in packed["state"].items():
        if key in owners:
            name, parameter = owners[key]
            state[name] = split(value, name, parameter, put)
            spans = (t.dim() == 1 and t.numel() == total != parameter.numel() for t in tensors_in(value))
            in_order = in_order or any(spans)
        else:
            extras.append([key, split(value, f"others.{key}", None, put)])
    groups = [
        {
            "params": group_names,
            "settings": {
                key: split(value, f"groups.{i}.{key}", None, put)
                for key, value in group.items()
                if key not in _PARAMETERS
            },
        }
        for i, (group_names, group) in enumerate(zip(names, packed["param_groups"], strict=True))
    ]
    extra = {
        key: split(value, f"extra.{key}", None, put)
        for key, value in packed.items()
        if key not in {"state", "param_groups"}
    }
    return OptimizerValues(groups, state, extras, extra, in_order)


def check_fits(
    model: nn.Module, optimizer: Optimizer, saved: OptimizerValues, path: Path, *, same_groups: bool
) -> None:
    """Make sure that an optimizer has the parameters, and the kind of groups, that were saved."""
    names = _names_as_saved(model, optimizer, saved)
    _check_parameters(names, saved, path)
    _check_order(names, saved, path, optimizer)
    origins = _origins(names, saved)
    for index, group in enumerate(optimizer.param_groups):
        _check_group(index, group, names[index], saved, path, optimizer)
    if same_groups and (len(names) != len(saved.groups) or any(o - {i} for i, o in enumerate(origins))):
        msg = (
            f"{path}: the optimizer's parameter groups come in another order, or hold other parameters, than "
            "those that were saved, and the scheduler keeps its numbers in the order of the groups; make "
            "them as the run did"
        )
        raise StateError(msg)


def numbered_state(
    model: nn.Module, optimizer: Optimizer, saved: OptimizerValues, get: Get
) -> dict[str, Any]:
    """Return what ``optimizer.load_state_dict`` takes, in the order of this optimizer's parameters."""
    names = _names_as_saved(model, optimizer, saved)
    packed = optimizer.state_dict()
    groups = []
    for group, origins in zip(packed["param_groups"], _origins(names, saved), strict=True):
        if origins:
            settings = saved.groups[min(origins)]["settings"]
        else:
            settings = {}
        groups.append(group | {key: _like_old(group.get(key), value) for key, value in settings.items()})
    flat = [name for group in names for name in group]
    parameters = dict(zip(flat, _parameters(optimizer), strict=True))
    keys = [key for group in packed["param_groups"] for key in group["params"]]
    numbers = dict(zip(flat, keys, strict=True))
    state: dict[Any, Any] = {numbers[n]: joined(v, parameters[n], get) for n, v in saved.state.items()}
    state |= {key: joined(value, None, get) for key, value in saved.others}
    extra = {key: joined(value, None, get) for key, value in saved.extra.items()}
    return {**extra, "state": state, "param_groups": groups}


def parameters_as_saved(model: nn.Module, optimizer: Optimizer, saved: OptimizerValues) -> dict[str, Tensor]:
    """Return the optimizer's parameters by the names under which their state was saved."""
    flat = [name for group in _names_as_saved(model, optimizer, saved) for name in group]
    return dict(zip(flat, _parameters(optimizer), strict=True))


def _names_as_saved(model: nn.Module, optimizer: Optimizer, saved: OptimizerValues) -> list[list[str]]:
    """Return the optimizer's names; of a tied parameter the one under which it was saved."""
    by_name = named_parameters(model)
    before = {id(by_name[n]): n for group in saved.groups for n in group["params"] if n in by_name}
    names = optimizer_names(model, optimizer)
    return [
        [before.get(id(p), name) for name, p in zip(group_names, group["params"], strict=True)]
        for group_names, group in zip(names, optimizer.param_groups, strict=True)
    ]


def _origins(names: Sequence[Sequence[str]], saved: OptimizerValues) -> list[set[int]]:
    """Return from which saved groups the parameters of each group come; empty groups stand for each other."""
    origin = {name: i for i, group in enumerate(saved.groups) for name in group["params"]}
    empty = iter([i for i, group in enumerate(saved.groups) if not group["params"]])
    return [{origin[n] for n in group} if group else set(islice(empty, 1)) for group in names]


def _check_parameters(names: Sequence[Sequence[str]], saved: OptimizerValues, path: Path) -> None:
    now = {name for group in names for name in group}
    before = {name for group in saved.groups for name in group["params"]}
    for differing, has in (
        (sorted(before - now), "an optimizer with {}, which this one lacks"),
        (sorted(now - before), "an optimizer without {}, which this one has"),
    ):
        if differing:
            parameters = f"the parameter {differing[0]!r}"
            if len(differing) > 1:
                parameters += f" (and {len(differing) - 1} more)"
            msg = f"{path} is of {has.format(parameters)}; make the optimizer from the parameters that it had"
            raise StateError(msg)


def _check_order(
    names: Sequence[Sequence[str]], saved: OptimizerValues, path: Path, optimizer: Optimizer
) -> None:
    flat = [name for group in names for name in group]
    before = [name for group in saved.groups for name in group["params"]]
    if saved.in_order and flat != before:
        first = next(i for i, pair in enumerate(zip(flat, before, strict=True)) if pair[0] != pair[1])
        msg = (
            f"{path}: {type(optimizer).__name__} keeps its state of all parameters at once, in their order, "
            f"and parameter {first} was {before[first]!r} and is {flat[first]!r} now; give the parameters in "
            "the order that they had"
        )
        raise StateError(msg)


def _check_group(
    index: int,
    group: Mapping[str, Any],
    names: Sequence[str],
    saved: OptimizerValues,
    path: Path,
    optimizer: Optimizer,
) -> None:
    """Make sure that a group's parameters had the same settings, and those of this kind of optimizer."""
    settings_of = {name: g["settings"] for g in saved.groups for name in g["params"]}
    for name in names:
        settings, other = settings_of[names[0]], settings_of[name]
        if settings is other:
            continue
        key = next((k for k in settings if k not in other or not _equal(settings[k], other[k])), None)
        if key is not None:
            msg = (
                f"{path}: parameter group {index} has {names[0]!r} and {name!r}, which were in groups of "
                f"different {key!r}: {settings[key]!r} and {other.get(key)!r}; make the groups as the run did"
            )
            raise StateError(msg)
    # Other versions of torch may lack some that this one has.
    if names:
        foreign = sorted(settings_of[names[0]].keys() - group.keys() - _OF_SCHEDULERS)
    else:
        foreign = []
    if foreign:
        msg = (
            f"{path} is of another kind of optimizer: it has {', '.join(map(repr, foreign))}, which "
            f"{type(optimizer).__name__} lacks; resume with the one that the run had"
        )
        raise StateError(msg)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return bool(one == other)


def _like_old(old: Any, value: Any) -> Any:
    """Give a setting the form that it has in the optimizer: a tensor, or a number."""
    if isinstance(old, Tensor):
        if isinstance(value, Tensor):
            return value.to(device=old.device, dtype=old.dtype)
        return torch.full_like(old, value)
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    return value


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
