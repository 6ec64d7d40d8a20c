"""Candidates for a plan, still to be proven: vocabulary, pairs of layers, attentions, experts, sequences."""

import re
from collections.abc import Collection, Iterator
from itertools import product
from typing import Any

from torch import Tensor, nn
from tp_core.errors import ConfigError, ModelError

from tp_shard._groups._group import ALONE
from tp_shard._plans._adapters import is_adapted, modules_inside, refusal_of_adapters, with_copies
from tp_shard._plans._modules import ancestors
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
from tp_shard._search._trace import Region, innermost_around
from tp_shard._verify._examples import TrialCall, tensors_of
from tp_shard.nn._convert import (
    Conversion,
    base_of,
    computes_linear,
    is_linear,
    is_transposed,
    why_not_split,
    widths,
)
from tp_shard.nn._heads import Heads
from tp_shard.nn._own_forward import check_own_forward

_FEW_CLASSES = 1024


def vocabulary(
    model: nn.Module,
    plan: Plan,
    notes: dict[str, str],
    *,
    last: Collection[str],
    called: Collection[str],
) -> dict[str, Style]:
    """Return styles for the head and the embeddings as tall as it or tied to it, else for the tallest one.

    A head of few classes stays whole: joining its logits would cost more than it saves. ``last`` are the
    layers with outputs that the model returns. A table that is not ``called`` stays whole, too: its weight
    may be read directly, as queries in detectors. ``notes`` gets the reasons, by name.
    """
    inside = modules_inside(model)
    modules = {path: m for path, m in model.named_modules() if id(m) not in inside}
    adapted = {f"{path}.base_layer": path for path, m in modules.items() if is_adapted(m)}
    conversion = Conversion(model, ALONE)

    def partners(path: str) -> list[str]:
        names = [partner for partner, _ in conversion.partners(base_of(modules[path]))]
        return [adapted.get(name, name) for name in names]

    tables: dict[str, nn.Embedding] = {}
    for path, module in modules.items():
        if isinstance(module, nn.Embedding) and any(name in called for name in [path, *partners(path)]):
            tables[path] = module
    heights = {table.num_embeddings for table in tables.values()}
    heads: dict[str, int] = {}  # with their numbers of classes
    for path, module in modules.items():
        if isinstance(base_of(module), nn.Linear) and path not in plan and path in last:
            classes = widths(module)[1]
            if classes in heights or classes >= _FEW_CLASSES:
                heads[path] = classes
    sizes = set(heads.values()) or {max(heights, default=0)}
    styles: dict[str, Style] = {path: Vocab(gather_output=True) for path in heads}
    styles.update({path: Vocab() for path, table in tables.items() if table.num_embeddings in sizes})
    styles = with_copies(model, styles)
    refused: dict[str, str] = {}
    for path in styles:
        reason = refusal(modules[path])
        if reason is not None:
            refused[path] = reason
    while True:  # a layer that shares a weight with one that stays whole stays whole too, and so on
        for path in styles:
            for partner in partners(path):
                if partner not in styles or partner in refused:
                    refused.setdefault(path, f"it shares its weight with {partner}, which stays whole")
        if not refused.keys() & styles.keys():
            return styles
        notes.update(refused)
        styles = {path: style for path, style in styles.items() if path not in refused}


def refusal(module: nn.Module) -> str | None:
    """Return the reason why a layer cannot be split, ``None`` if it can."""
    reason = None
    if is_adapted(module):
        reason = refusal_of_adapters(module)
    module = base_of(module)
    reason = reason or why_not_split(module)
    if reason is not None:
        return reason
    if is_transposed(module) or computes_linear(module):
        return None
    try:
        check_own_forward(module)
    except ModelError as error:
        return str(error)
    return None


# -- Candidates for the split of a region ---------------------------------------------------------


_HEADS = ("num_heads", "n_head", "n_heads", "num_attention_heads", "heads", "nhead", "attention_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head", "kv_heads")
_HEAD_WIDTHS = ("head_dim", "head_size", "attention_head_size", "key_value_proj_dim", "d_kv", "v_head_dim")
_COUNTS_HEADS = re.compile(r"(^|_)(n|num)?_?heads?($|_)|nhead|_heads$")
_IS_WIDTH = re.compile(r"dim|size|width|inner|hidden")
_OF_KEYS = re.compile(r"kv|key_value")
_IS_GROUP = re.compile(r"group|n_rep")


def plain_variants(model: nn.Module, region: Region) -> Iterator[dict[str, Style]]:
    """Yield plans for a region that does not mix positions: a feed-forward block."""
    features = widths(model.get_submodule(region.row))[0]
    choices: list[list[Style]] = []
    for name in region.columns:
        fused, rest = divmod(widths(model.get_submodule(name))[1], features)
        if rest or not fused:
            return
        if fused == 1:
            choices.append([Column()])
        else:
            choices.append([Column(sections=fused), Column(heads=features)])
    for styles in product(*choices):
        yield {**dict(zip(region.columns, styles, strict=True)), region.row: Row(), **_styles_inside(region)}


def head_counts(model: nn.Module, region: Region) -> list[tuple[int, int]]:
    """Return candidates for the numbers of query and key heads, from widths and from modules around."""
    features = widths(model.get_submodule(region.row))[0]
    narrowest = min(widths(model.get_submodule(name))[1] for name in region.columns)
    places: list[object] = []
    for path in ancestors(region.columns[0].rpartition(".")[0]):
        module = model.get_submodule(path)
        places += [module, getattr(module, "config", None)]
    counts: list[tuple[int, int]] = []
    for place in places:
        heads = _first_number(place, _HEADS)
        width = _first_number(place, _HEAD_WIDTHS)
        if heads is None and width and features % width == 0:
            heads = features // width
        if heads is None or heads < 1 or features % heads:
            continue
        each = features // heads
        by_width = None
        if narrowest % each == 0 and narrowest < features:
            by_width = narrowest // each
        for kv in (_first_number(place, _KV_HEADS), by_width, heads):
            if kv and heads % kv == 0 and (heads, kv) not in counts:
                counts.append((heads, kv))
    return counts


def attention_variants(
    model: nn.Module, region: Region, call: TrialCall, ranks: int
) -> Iterator[dict[str, Style]]:
    """Yield plans for an attention, by whole heads."""
    for heads, kv in head_counts(model, region):
        try:
            counts = Heads(heads, kv, ranks)
        except ConfigError:
            continue
        for layout in _layouts(model, region, counts):
            for local in _locals(model, region, counts, call):
                yield {**layout, **local, **_styles_inside(region)}


def _layouts(model: nn.Module, region: Region, counts: Heads) -> Iterator[dict[str, Style]]:
    each = widths(model.get_submodule(region.row))[0] // counts.query
    heads = counts.query
    kv = counts.kv
    queries = Column(heads=heads, kv_heads=kv)
    keys = Column(heads=heads, kv_heads=kv, holds="kv")
    fused = Column(heads=heads, kv_heads=kv, holds="qkv")
    choices: list[list[Column]] = []
    for name in region.columns:
        width = widths(model.get_submodule(name))[1]
        if kv < heads and width == kv * each:
            choices.append([keys])
        elif width == (heads + 2 * kv) * each:
            choices.append([fused, Column(heads=kv, kv_heads=kv)])  # one after another, or head by head
        elif width % heads == 0:
            choices.append([queries])
        elif width % kv == 0:
            choices.append([keys])
        else:
            return
    row = Row(heads=heads, kv_heads=kv)
    tables: dict[str, Style] = {}
    for name in region.tables:
        if widths(model.get_submodule(name))[1] == heads:
            tables[name] = Column(heads=heads, kv_heads=kv)
    for styles in product(*choices):
        yield {**dict(zip(region.columns, styles, strict=True)), region.row: row, **tables}


def _locals(model: nn.Module, region: Region, counts: Heads, call: TrialCall) -> Iterator[dict[str, Style]]:
    """Yield styles for modules around split layers that may count heads themselves, fewer numbers first."""
    around = [
        path
        for path, module in model.get_submodule(region.container).named_modules()
        if any(True for _ in module.children())
        and not isinstance(module, nn.ModuleList | nn.ModuleDict)
        and not is_adapted(module)
    ]
    start = region.container
    paths = [f"{start}.{path}" if start and path else start or path for path in around]
    features = widths(model.get_submodule(region.row))[0]
    own = [name for name in region.parameters if name.rpartition(".")[0] in paths]
    inputs = _inputs(call, counts)
    seen: list[dict[str, Style]] = []
    input_choices = (False, True) if inputs else (False,)
    for with_inputs in input_choices:
        for numbers in ("", "heads", "heads sizes", "config", "heads config", "heads sizes config"):
            plan: dict[str, Style] = {}
            for path in paths:
                module = model.get_submodule(path)
                names = _names(module, counts, features, numbers)
                if with_inputs and path == region.container:
                    gathered = inputs
                else:
                    gathered = ()
                parameters = tuple(n.rpartition(".")[2] for n in own if n.rpartition(".")[0] == path)
                if any(names) or gathered or parameters:
                    query, shared, groups = names
                    plan[path] = Local(
                        heads=counts.query,
                        kv_heads=counts.kv,
                        query=query,
                        shared=shared,
                        groups=groups,
                        inputs=gathered,
                        parameters=parameters,
                    )
            if plan not in seen:
                seen.append(plan)
                yield plan


def _names(
    module: nn.Module, counts: Heads, features: int, kinds: str
) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """Return the names of a module's numbers that count query heads, key heads, and heads of a group."""
    query: list[str] = []
    shared: list[str] = []
    groups: list[str] = []
    numbers: dict[str, Any] = {}
    if "heads" in kinds:
        numbers.update({name: v for name, v in vars(module).items() if _is_number(v)})
    config = getattr(module, "config", None)
    if "config" in kinds and config is not None:
        numbers.update({f"config.{name}": v for name, v in vars(config).items() if _is_number(v)})
    each = features // counts.query
    for name, value in numbers.items():
        of_keys = counts.kv < counts.query and value in (counts.kv, counts.kv * each)
        if _IS_GROUP.search(name):
            is_group = counts.kv < counts.query and value == counts.query // counts.kv
            if is_group and not name.startswith("config."):
                groups.append(name)
        elif _IS_WIDTH.search(name):
            if "sizes" in kinds and not name.startswith("config."):
                if value == features:
                    query.append(name)
                elif value == counts.kv * each and _OF_KEYS.search(name):
                    shared.append(name)
        elif _COUNTS_HEADS.search(name):
            if _OF_KEYS.search(name) and (of_keys or value == counts.kv):
                shared.append(name)
            elif value == counts.query and not _OF_KEYS.search(name):
                query.append(name)
        elif "sizes" in kinds and value == features and not name.startswith("config."):
            query.append(name)
    return tuple(query), tuple(shared), tuple(groups)


def _inputs(call: TrialCall, counts: Heads) -> tuple[str, ...]:
    """Return the names of arguments that may contain all heads."""
    names = []
    for name, value in call.kwargs.items():
        if not isinstance(value, Tensor):
            continue
        has_heads = value.dim() == 4 and value.size(1) == counts.query
        # Folded into the batch, as biases of positions are.
        may_fold = value.dim() in (1, 2, 3) and name != "hidden_states"
        if has_heads or (may_fold and value.size(0) % counts.query == 0):
            names.append(name)
    return tuple(names)


def expert_variants(model: nn.Module, path: str, call: TrialCall) -> Iterator[dict[str, Style]]:
    """Yield plans for experts with weights that are parameters of one module."""
    module = model.get_submodule(path)
    own = {name: p for name, p in module._parameters.items() if p is not None}
    weights = {name: p for name, p in own.items() if p.dim() == 3}
    width = next((t.size(-1) for _, t in tensors_of((call.args, call.kwargs)) if t.is_floating_point()), 0)
    for transposed in (False, True):
        out, into = (2, 1) if transposed else (1, 2)
        columns = [n for n, p in weights.items() if p.size(into) == width]
        for row in [n for n, p in weights.items() if p.size(out) == width]:
            hidden = weights[row].size(into)
            fed = [n for n in columns if n != row and weights[n].size(out) % hidden == 0]
            if not fed or len(fed) + 1 < len(weights):
                continue
            fused = weights[fed[0]].size(out) // hidden
            sizes = {weights[n].size(out) for n in fed}
            biases = {n: p for n, p in own.items() if p.dim() == 2 and n not in weights}
            split = tuple(fed) + tuple(n for n, p in biases.items() if p.size(1) in sizes and row not in n)
            once = tuple(n for n in biases if n not in split)
            choices = (fused, 1) if fused > 1 else (1,)
            for sections in choices:
                experts = Experts(
                    columns=split, rows=(row,), sections=sections, transposed=transposed, once=once
                )
                yield {path: experts}


def _styles_inside(region: Region) -> dict[str, Style]:
    """Return styles for the modules between column and row layers."""
    container = region.container
    owners = {name.rpartition(".")[0] for name in region.parameters}
    around = set(ancestors(container))
    names = sorted({o for o in owners if o not in around} | set(region.dropouts))
    return {name: Replicated() for name in names}


def _first_number(place: object, names: tuple[str, ...]) -> int | None:
    values = (getattr(place, name, None) for name in names)
    return next((value for value in values if _is_number(value)), None)


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


# -- Sequence parallelism for the blocks of a model -----------------------------------------------


def with_sequences(model: nn.Module, plan: dict[str, Style], regions: list[Region]) -> dict[str, Style]:
    """Return a plan under which the lists of blocks of a model work on parts of the sequence."""
    split = [r for r in regions if isinstance(plan.get(r.row), Row)]
    result = dict(plan)
    lists: list[str] = []
    for path, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or any(_is_within(path, other) for other in lists):
            continue
        rows = [r for r in split if _is_within(r.row, path)]
        if rows:
            result[path] = Sequence()
            lists.append(path)
            for name, block in module.named_children():
                _BlockStyles(result, rows).visit(f"{path}.{name}", block, top=True)
    return result


class _BlockStyles:
    """A visitor that gives styles to the modules of a block, from the outside in."""

    def __init__(self, plan: dict[str, Style], rows: list[Region]) -> None:
        self._plan = plan
        self._joined = [r for r in rows if any(_is_joined(plan.get(c)) for c in r.columns)]
        self._gathers = {innermost_around(r.columns): r for r in rows if r not in self._joined}
        self._split = {name for r in rows if r not in self._joined for name in (*r.columns, r.row)}

    def visit(self, path: str, module: nn.Module, *, top: bool = False) -> None:
        style = self._plan.get(path)
        if path in self._gathers and not top:
            local = style if isinstance(style, Local) else None
            self._plan[path] = Gathered(local=local)
            return
        if path in self._split:
            return
        if not _has_weights(module):
            if not list(module.children()):
                if any(True for _ in module.parameters()):
                    self._plan[path] = Sequence()
                return
        elif not top and not any(_is_within(name, path) for name in self._split):
            local = style if isinstance(style, Local) else None
            self._plan[path] = Gathered(whole=True, local=local)
            return
        for name, child in module.named_children():
            self.visit(f"{path}.{name}", child)


def _has_weights(module: nn.Module) -> bool:
    """Return whether a module has weights that may mix positions or be split: any but those of norms."""
    return any(is_linear(m) or isinstance(m, nn.Embedding) or _is_block(m) for m in module.modules())


def _is_block(module: nn.Module) -> bool:
    return any(p is not None and p.dim() > 1 for p in module._parameters.values())


def _is_joined(style: Style | None) -> bool:
    return isinstance(style, Column) and style.gather_output


def _is_within(path: str, outer: str) -> bool:
    return path.startswith(f"{outer}.")
