"""Which modules a plan names, and whether its styles are for such modules."""

from fnmatch import fnmatchcase

from torch import nn
from tp_core.errors import ConfigError, ModelError

from tp_shard._groups._group import Group
from tp_shard._plans._styles import (
    Column,
    Experts,
    Gathered,
    Local,
    Plan,
    Replicated,
    Row,
    Sequence,
    Style,
    Vocab,
)
from tp_shard._shards._layer import ParallelLayer
from tp_shard.nn._kinds import is_linear, why_not_split, widths
from tp_shard.nn._planned import SequenceMixin
from tp_shard.nn._region import ParallelDropout

__all__ = ["check_kind", "check_pairs", "choose"]


def check_pairs(model: nn.Module, chosen: dict[str, tuple[nn.Module, Style]], group: Group) -> None:
    """Make sure that no layer beside a column layer takes its split outputs as if they were whole."""
    if group.size == 1:
        return
    styles = {id(module): style for module, style in chosen.values()}
    for path, parent in model.named_modules():
        linears = {n: m for n, m in parent.named_children() if is_linear(m)}
        if any(isinstance(styles.get(id(m)), Row) for m in linears.values()):
            continue
        for name, layer in linears.items():
            style = styles.get(id(layer))
            if not isinstance(style, Column) or style.gather_output:
                continue
            width = widths(layer)[1] // style.sections
            takers = [n for n, m in linears.items() if id(m) not in styles and widths(m)[0] == width]
            if takers:
                before = f"{path}." if path else ""
                msg = (
                    f"{before}{name} is {style}, whose outputs are split, and {before}{takers[-1]} beside it "
                    f"would take all {width} of them: give that one Row(), or {name} "
                    "Column(gather_output=True)"
                )
                raise ConfigError(msg)


def choose(model: nn.Module, plan: Plan) -> dict[str, tuple[nn.Module, Style]]:
    """Return the modules that a plan names, by their names, each with its style.

    Raises:
        ConfigError: A pattern fits no module.
    """
    chosen: dict[str, tuple[nn.Module, Style]] = {}
    used: set[str] = set()
    for path, module in model.named_modules():
        fitting = [p for p in plan if _fits(p.split("."), path.split("."))]
        used.update(fitting)
        if fitting:
            chosen[path] = module, plan[fitting[0]]
    unused = [pattern for pattern in plan if pattern not in used]
    if unused:
        names = [repr(path) for path, m in model.named_modules() if path and not list(m.children())]
        msg = f"the plan's {unused} fit no layer; the layers are {', '.join(names[:20])}" + (
            ", ..." if len(names) > 20 else ""
        )
        raise ConfigError(msg)
    return chosen


def _fits(pattern: list[str], path: list[str]) -> bool:
    if not pattern or not path:
        return pattern in ([], ["**"]) and not path
    if pattern[0] == "**":
        return _fits(pattern[1:], path) or _fits(pattern, path[1:])
    return fnmatchcase(path[0], pattern[0]) and _fits(pattern[1:], path[1:])


def check_kind(path: str, module: nn.Module, style: Style) -> None:
    """Make sure that a style is for such a layer.

    Raises:
        ModelError: The module is split already, or the style is for another kind of module.
    """
    kind = type(module).__name__
    if isinstance(module, ParallelLayer | SequenceMixin | ParallelDropout):
        msg = f"{path} is split already: {module}"
        raise ModelError(msg)
    reason = why_not_split(module) if isinstance(style, Column | Row | Vocab) else None
    if reason is not None:
        msg = f"{path or 'the layer'} cannot be split: {reason}"
        raise ModelError(msg)
    if isinstance(style, Local | Experts | Gathered):
        return
    if isinstance(style, Sequence) and isinstance(module, nn.ModuleList):
        if len(module) == 0:
            msg = f"{path} is an empty list; Sequence() is for lists of blocks"
            raise ModelError(msg)
        return
    if isinstance(style, Sequence):
        if is_linear(module) or any(m is not module for m in module.modules()):
            msg = f"{path} is a {kind}; Sequence() is for single norms, dropouts and embeddings"
            raise ModelError(msg)
        return
    if isinstance(style, Replicated):
        if any(m is not module for m in module.modules()):
            msg = f"{path} is a {kind} with modules in it; Replicated() is for single ones: name those"
            raise ModelError(msg)
        return
    tables = isinstance(style, Vocab) or (isinstance(style, Column) and style.heads is not None)
    if not is_linear(module) and not (tables and isinstance(module, nn.Embedding)):
        names = "nn.Linear or nn.Embedding" if isinstance(style, Vocab) else "nn.Linear"
        msg = f"{path} is a {kind}, and {style} is for an {names}"
        raise ModelError(msg)
