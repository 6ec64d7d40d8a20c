"""The units of a model, between which it can be cut, and how parameters and forwards are replaced."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn
from tp_core.errors import ConfigError, ModelError
from tp_core.modules import repeated_blocks


def find_units(model: nn.Module, cuts: Sequence[str] | None) -> tuple[dict[str, nn.Module], set[str]]:
    """Return the units of a model by name, and the names of those with which a stage may begin.

    Units are the blocks with which stages may begin, and what stands beside them or beside a module around
    them, if it has parameters.

    Raises:
        ModelError: The model has no blocks that repeat.
        ConfigError: A cut by hand is no module of the model.
    """
    modules = dict(model.named_modules())
    if cuts is None:
        starts = set(_blocks(model))
    else:
        _check_cuts(cuts, modules)
        starts = set(cuts)

    # The modules around blocks, up to the model itself.
    around = {""}
    for name in starts:
        parent = _parent_of(name)
        while parent:
            around.add(parent)
            parent = _parent_of(parent)
    nested = next((name for name in starts if name in around), None)
    if nested is not None:
        msg = f"the option cuts names {nested!r} and a module within it; a stage begins with one of them"
        raise ConfigError(msg)

    units = {}
    for name, module in modules.items():
        if not name or name in around or _parent_of(name) not in around:
            continue
        if name in starts or _has_parameters(module):
            units[name] = module
    return units, starts


def _check_cuts(cuts: Sequence[str], modules: Mapping[str, nn.Module]) -> None:
    """Check that stages begin with modules of the model.

    Raises:
        ConfigError: A name is of none.
    """
    missing = next((name for name in cuts if name not in modules or not name), None)
    if missing is not None:
        names = [name for name, module in modules.items() if name and _has_parameters(module)]
        more = ", ..." if len(names) > 8 else ""
        msg = (
            f"the option cuts of backend 'pipeline' names {missing!r}, which is no module of the model; "
            f"it has {', '.join(names[:8])}{more}"
        )
        raise ConfigError(msg)


def _blocks(model: nn.Module) -> list[str]:
    """Return the names of the outermost blocks that repeat; without them, of the layers of the longest list.

    Raises:
        ModelError: There is no list of two layers, either.
    """
    try:
        blocks = repeated_blocks(model)
        return [name for name in blocks if not any(name.startswith(f"{outer}.") for outer in blocks)]
    except ModelError:
        pass
    # Layers of a kind each, as in Sequential(Linear, Tanh, Linear).
    longest: list[str] = []
    for prefix, module in model.named_modules():
        if not isinstance(module, nn.Sequential | nn.ModuleList):
            continue
        layers = []
        for name, layer in module.named_children():
            if _has_parameters(layer):
                full_name = f"{prefix}.{name}" if prefix else name
                layers.append(full_name)
        if len(layers) > len(longest):
            longest = layers
    if len(longest) < 2:
        msg = (
            "backend 'pipeline' finds no place to cut the model: it has no blocks that repeat in a "
            "Sequential or ModuleList; name the modules with which stages begin, for two stages "
            f"options={{'pipeline': {{'cuts': [{_last_part(model)!r}]}}}}"
        )
        raise ModelError(msg)
    return longest


def _last_part(model: nn.Module) -> str:
    """Return the name of the last of the outermost modules of which there are several with parameters."""
    prefix = ""
    while True:
        parts = [name for name, child in model.named_children() if _has_parameters(child)]
        if len(parts) != 1:
            last = parts[-1] if parts else "decoder"
            return prefix + last
        prefix += f"{parts[0]}."
        model = model.get_submodule(parts[0])


def _parent_of(name: str) -> str:
    return name.rpartition(".")[0]


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def smallest_largest(pieces: list[float], parts: int) -> list[int]:
    """Cut a list into consecutive parts so that the largest sum is the smallest; return where parts begin.

    Example:
        >>> smallest_largest([1, 1, 1, 1, 4], 2)
        [4]
    """
    sums = [0.0]
    for piece in pieces:
        sums.append(sums[-1] + piece)
    best: dict[tuple[int, int], tuple[float, list[int]]] = {}
    for end in range(1, len(pieces) + 1):
        best[1, end] = sums[end], []
    for count in range(2, parts + 1):
        for end in range(count, len(pieces) + 1):
            # Where the last part begins: the others are cut as well as they can be.
            starts = range(count - 1, end)
            largest, start = min((max(best[count - 1, s][0], sums[end] - sums[s]), s) for s in starts)
            best[count, end] = largest, [*best[count - 1, start][1], start]
    return best[parts, len(pieces)][1]


@contextmanager
def swapped(model: nn.Module, make: Callable[[str, nn.Parameter], nn.Parameter | None]) -> Iterator[None]:
    """Replace parameters of a model for the duration of the context, tied ones by the same one.

    Args:
        model: The model.
        make: Returns what replaces a parameter, by its first name; ``None`` keeps it.
    """
    made: dict[nn.Parameter, nn.Parameter | None] = {}
    undo: list[tuple[dict[str, Any], str, nn.Parameter]] = []
    try:
        for prefix, module in model.named_modules():
            for name, parameter in module._parameters.items():
                if parameter is None:
                    continue
                if parameter not in made:
                    full_name = f"{prefix}.{name}" if prefix else name
                    made[parameter] = make(full_name, parameter)
                new = made[parameter]
                if new is not None:
                    vars(new).update(vars(parameter))  # marks of those who split it
                    undo.append((module._parameters, name, parameter))
        for parameters, name, parameter in undo:  # past nn.Module's slow and checking __setattr__
            parameters[name] = made[parameter]
        yield
    finally:
        for parameters, name, parameter in undo:
            parameters[name] = parameter


@contextmanager
def forwards(units: dict[str, nn.Module], call: Callable[..., Any]) -> Iterator[None]:
    """Replace the forward of each unit by ``call(name, forward, *args, **kwargs)`` in the context."""
    before = {name: vars(unit).get("forward") for name, unit in units.items()}
    try:
        for name, unit in units.items():
            vars(unit)["forward"] = partial(call, name, unit.forward)
        yield
    finally:
        for name, unit in units.items():
            if before[name] is None:
                vars(unit).pop("forward", None)
            else:
                vars(unit)["forward"] = before[name]
