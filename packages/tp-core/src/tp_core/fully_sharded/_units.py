"""The units of a model: modules with parameters that are gathered together and freed together."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from tp_core.errors import ConfigError, ModelError
from tp_core.fully_sharded._options import UnitRule
from tp_core.modules._blocks import CONTAINERS, found_blocks, named_blocks
from tp_core.modules._parameters import check_no_max_norm

_LEAST_NBYTES = 4 * 2**20
"""The least size of a unit that is found by size: a smaller one is not worth its own collective."""
_PARTS = 8
"""The rough number of units of a model that is cut by size."""
_USES_WEIGHTS_OF_ITS_PARTS = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


@dataclass(frozen=True, slots=True)
class Units:
    """The units of a model.

    Attributes:
        modules: The units by name, in the model's order; a unit within another one comes after it. The
            whole model, which is always a unit, is left out.
        how: The rule by which they were found, in words.
    """

    modules: dict[str, nn.Module]
    how: str

    def __str__(self) -> str:
        if not self.modules:
            return f"the whole model is one unit ({self.how})"
        kinds = Counter(_class_name(module) for module in self.modules.values())
        listed = " and ".join(f"{n} x {kind}" for kind, n in kinds.most_common(3))
        return f"units: {listed} ({self.how})"


def find_units(model: nn.Module, rule: UnitRule) -> Units:
    """Return the units of a model.

    Raises:
        ConfigError: The rule is of another type, or finds no module.
        ModelError: Units that were asked for share a parameter, or have no forward pass; or a module of the
            model is not one that ``fully_shard`` can train.
    """
    _check_kinds(model)
    if isinstance(rule, str) and rule == "auto":
        return _without_shared(model, _automatic(model))
    wanted, how = _predicate(rule)
    units = {name: m for name, m in model.named_modules() if m is not model and wanted(m)}
    if not units and not wanted(model):
        kinds = sorted({_class_name(m) for m in model.modules()})
        more = " ..." if len(kinds) > 12 else ""
        msg = (
            f"the option units ({how}) finds no module in the model, which has {', '.join(kinds[:12])}{more}"
        )
        raise ConfigError(msg)
    for name, module in units.items():
        if isinstance(module, CONTAINERS):
            msg = (
                f"{name!r} is a {_class_name(module)}, which has no forward pass that could gather its "
                "parameters, and cannot be a unit; name the class of what is in it"
            )
            raise ModelError(msg)
    for name, places in _sharing(model, units):
        listed = " and in ".join(f"the unit {place!r}" if place else "no unit" for place in places)
        msg = (
            f"the parameter {name!r} is shared: it lies in {listed}, and one place would "
            "compute with it while the other has let go of it; leave what shares it out of units, so that it "
            "is gathered with the whole model"
        )
        raise ModelError(msg)
    return Units(units, how)


def _check_kinds(model: nn.Module) -> None:
    check_no_max_norm(model, "each rank")
    for name, module in model.named_modules():
        part = f"its {name!r}" if name else "it"
        if isinstance(module, torch.jit.ScriptModule):
            msg = (
                f"the model cannot be sharded: {part} was made by torch.jit.script or trace, and takes no "
                "hook that would gather its parameters; give the module as it was written"
            )
            raise ModelError(msg)
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            msg = (
                f"the model cannot be sharded: {part} has sparse gradients ({_class_name(module)}), which "
                "fully_shard does not exchange; make it with sparse=False, or take backend 'ddp'"
            )
            raise ModelError(msg)


def _predicate(rule: UnitRule) -> tuple[Callable[[nn.Module], bool], str]:
    """Return a predicate of modules for a rule, and the rule in words."""
    several = isinstance(rule, list | tuple | set | frozenset)
    if isinstance(rule, list | tuple | set | frozenset):
        kinds = list(rule)
    else:
        kinds = [rule]
    names = {kind for kind in kinds if isinstance(kind, str)}
    classes = tuple(kind for kind in kinds if isinstance(kind, type) and issubclass(kind, nn.Module))
    if kinds and len(names) + len(classes) == len(set(kinds)):
        how = ", ".join(sorted({*names, *(c.__name__ for c in classes)}))
        return lambda m: isinstance(m, classes) or any(c.__name__ in names for c in type(m).__mro__), how
    if not several and callable(rule) and not isinstance(rule, type):
        asked: Callable[[nn.Module], bool] = rule
        return lambda m: bool(asked(m)), getattr(rule, "__qualname__", type(rule).__name__)
    msg = (
        "the option units must be 'auto', a class of modules, its name, several of them, "
        f"or a function that takes a module, got {type(rule).__name__}: {rule!r}"
    )
    raise ConfigError(msg)


# -- units of "auto" ------------------------------------------------------------------------------


def _automatic(model: nn.Module) -> Units:
    if blocks := named_blocks(model):
        return Units(blocks, "named by the model")
    if blocks := found_blocks(model):
        return Units(blocks, "blocks that repeat")
    total = _nbytes(model)
    limit = max(_LEAST_NBYTES, total // _PARTS)
    if total >= 2 * _LEAST_NBYTES:
        return Units(dict(_of_size(model, "", limit)), "by size")
    return Units({}, "small, without blocks that repeat")


def _of_size(module: nn.Module, prefix: str, limit: int) -> Iterator[tuple[str, nn.Module]]:
    """Yield modules of at most ``limit`` bytes that are large enough, and larger ones without children."""
    for name, child in module.named_children():
        nbytes = _nbytes(child)
        is_whole = not any(True for _ in child.children()) or isinstance(child, _USES_WEIGHTS_OF_ITS_PARTS)
        if isinstance(child, CONTAINERS) or (nbytes > limit and not is_whole):
            yield from _of_size(child, f"{prefix}{name}.", limit)
        elif nbytes >= min(limit, _LEAST_NBYTES):
            yield prefix + name, child


def _without_shared(model: nn.Module, units: Units) -> Units:
    """Return the units without those that share a parameter: it is gathered with the whole model."""
    sharing = {place for _, places in _sharing(model, units.modules) for place in places}
    return Units({n: m for n, m in units.modules.items() if n not in sharing}, units.how)


# -- parameters -----------------------------------------------------------------------------------


def _sharing(model: nn.Module, units: dict[str, nn.Module]) -> Iterator[tuple[str, list[str]]]:
    """Yield the parameters that are in several places, with the names of the places.

    A place is a unit; its name is empty for the modules in no unit.
    """
    names = {module: name for name, module in units.items()}
    # By ids: `walk` refers to itself, and would keep the whole parameters until the collector runs.
    by_parameter: dict[int, dict[str, None]] = {}
    called: dict[int, str] = {}

    def walk(module: nn.Module, prefix: str, place: str) -> None:
        for name, parameter in module.named_parameters(recurse=False):
            by_parameter.setdefault(id(parameter), {})[place] = None
            called.setdefault(id(parameter), prefix + name)
        for name, child in module.named_children():
            walk(child, f"{prefix}{name}.", names.get(child, place))

    walk(model, "", "")
    for key, paths in by_parameter.items():
        if len(paths) > 1:
            yield called[key], list(paths)


def _nbytes(module: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters())


def _class_name(module: nn.Module) -> str:
    return type(module).__name__
