"""Plans for models that are built in the usual ways."""

import re
from collections.abc import Iterator

from torch import nn
from tp_core.errors import ConfigError

from tp_shard._group import GroupLike, as_group
from tp_shard._partition import bounds
from tp_shard._plan import Column, Plan, Row, Sequence, Style, Vocab
from tp_shard.nn._heads import Heads

__all__ = ["auto"]

_HEADS = ("num_heads", "n_head", "n_heads", "num_attention_heads", "heads", "nhead")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head", "kv_heads")
_QKV = re.compile(r"(w?qkv|qkv_proj|c_attn|query_key_value|in_proj)$")
_Q = re.compile(r"(q_proj|q|query|wq|to_q)$")
_KV = re.compile(r"(k_proj|v_proj|k|v|key|value|wk|wv|to_k|to_v)$")
_OUT = re.compile(r"(o_proj|out_proj|out|proj|c_proj|wo|to_out|dense|o)$")
_GATE_UP = re.compile(r"(gate_up|gate_up_proj|w13)$")
_UP = re.compile(r"(gate_proj|up_proj|gate|up|fc1|c_fc|w1|w3|fc_in|linear1|dense_h_to_4h|intermediate)$")
_DOWN = re.compile(r"(down_proj|down|fc2|c_proj|w2|fc_out|linear2|dense_4h_to_h|proj)$")
_HEAD = re.compile(r"(lm_head|head|embed_out|output|classifier|unembed)$")


def auto(model: nn.Module, *, group: GroupLike = None, verbose: bool = True) -> dict[str, Style]:
    """Propose a plan for a transformer, by the names of its layers and the shapes around them.

    Attention is split by whole heads, whose number is read from the attention module, those above it
    or the model's ``config``; an MLP from column to row; embeddings of tokens and heads by
    vocabulary, where the model's loss is parallel. What is not recognised with its counterpart
    stays whole: half a pair would not work.

    Args:
        model: The model; it is not changed.
        group: The ranks; the current model-parallel group by default.
        verbose: Whether to print what the plan would do, and the bytes per rank.

    Returns:
        A plan for :func:`parallelize`, with a name for each layer.

    Raises:
        ConfigError: Nothing is recognised.

    Example:
        >>> model = nn.ModuleDict({"up_proj": nn.Linear(8, 16), "down_proj": nn.Linear(16, 8)})
        >>> auto(model, verbose=False)["down_proj"]
        Row(heads=None, kv_heads=None)
    """
    ranks = as_group(group)
    plan: dict[str, Style] = {}
    notes: dict[str, str] = {}
    for path, module in model.named_modules():
        linears = {n: m for n, m in module.named_children() if isinstance(m, nn.Linear)}
        if isinstance(module, nn.MultiheadAttention):
            notes[path] = "torch's own attention reads its weights past its layers"
            continue
        for name, style in _pair(linears, _heads(model, path), ranks.size, notes, path):
            plan[f"{path}.{name}" if path else name] = style
    plan.update(_vocabulary(model, plan))
    if not plan:
        msg = (
            f"no layer of {type(model).__name__} is named as in a usual transformer; write a plan: "
            '{"layers.*.up": Column(), "layers.*.down": Row()}'
        )
        raise ConfigError(msg)
    if verbose:
        print(_describe(model, plan, notes, ranks.size))
    return plan


def _pair(
    linears: dict[str, nn.Linear],
    heads: tuple[int, int] | None,
    ranks: int,
    notes: dict[str, str],
    path: str,
) -> Iterator[tuple[str, Style]]:
    """Yield what becomes of an attention's or an MLP's layers, if all of them are recognised."""
    q = [n for n in linears if _Q.match(n)]
    kv = [n for n in linears if _KV.match(n)]
    qkv = [n for n in linears if _QKV.match(n)]
    out = [n for n in linears if _OUT.match(n)]
    if (qkv or (q and len(kv) == 2)) and len(out) == 1:
        if heads is None:
            notes[path] = f"the number of heads is not known: none of {', '.join(_HEADS)} is there"
            return
        try:
            Heads(*heads, ranks)
        except ConfigError as error:
            notes[path] = str(error)
            return
        count, shared = heads
        made = [linears[n].out_features for n in qkv] + [linears[n].in_features for n in out]
        if qkv and (made[0] % (count + 2 * shared) or made[1] % count):
            notes[path] = f"{made} features are not {count} query and {shared} key heads"
            return
        for name in qkv:
            yield name, Column(heads=count, kv_heads=shared, holds="qkv")
        for name in q:
            yield name, Column(heads=count, kv_heads=shared)
        for name in kv:
            yield name, Column(heads=count, kv_heads=shared, holds="kv")
        yield out[0], Row(heads=count, kv_heads=shared)
        return
    fused = [n for n in linears if _GATE_UP.match(n)]
    up = [n for n in linears if _UP.match(n)]
    down = [n for n in linears if _DOWN.match(n)]
    if len(down) != 1 or not (fused or up) or linears[down[0]].in_features < ranks:
        return
    width = linears[down[0]].in_features
    if any(linears[n].out_features != width for n in up) or any(
        linears[n].out_features != 2 * width for n in fused
    ):
        notes[path] = f"what comes out of {', '.join(up + fused)} is not as wide as {down[0]} takes"
        return
    for name in fused:
        yield name, Column(sections=2)
    for name in up:
        yield name, Column()
    yield down[0], Row()


def _heads(model: nn.Module, path: str) -> tuple[int, int] | None:
    """Return the numbers of query and key heads: the nearest that a module around ``path`` names."""
    parts = path.split(".") if path else []
    around = [model.get_submodule(".".join(parts[:n])) for n in range(len(parts), -1, -1)]
    for place in [*around, *(getattr(m, "config", None) for m in around)]:
        heads = _number(place, _HEADS)
        if heads is not None:
            return heads, _number(place, _KV_HEADS) or heads
    return None


def _number(place: object, names: tuple[str, ...]) -> int | None:
    found = (getattr(place, name, None) for name in names)
    return next((n for n in found if isinstance(n, int) and not isinstance(n, bool)), None)


def _vocabulary(model: nn.Module, plan: Plan) -> dict[str, Style]:
    """Split the head, and the embeddings as tall as it or tied to it; else the tallest embedding."""
    modules = dict(model.named_modules())
    heads = {
        path: m
        for path, m in modules.items()
        if isinstance(m, nn.Linear) and path not in plan and _HEAD.match(path.rpartition(".")[2])
    }
    tables = {path: m for path, m in modules.items() if isinstance(m, nn.Embedding)}
    sizes = {m.out_features for m in heads.values()} or {
        max((m.num_embeddings for m in tables.values()), default=0)
    }
    found: dict[str, Style] = {path: Vocab() for path in heads}
    found.update({path: Vocab() for path, m in tables.items() if m.num_embeddings in sizes})
    return found


def _describe(model: nn.Module, plan: Plan, notes: dict[str, str], ranks: int) -> str:
    lines: list[str] = []
    seen: set[int] = set()
    total = whole = 0
    for path, module in model.named_modules():
        own = [p for p in module._parameters.values() if p is not None and id(p) not in seen]
        seen.update(map(id, own))
        full = sum(p.numel() * p.element_size() for p in own)
        local = full
        style = plan.get(path)
        if style is not None and not isinstance(style, Sequence) and own:
            local = _local_bytes(style, ranks, own)
        whole, total = whole + full, total + local
        if style is not None:
            lines.append(f"{path}: {_words(style)}, {full:,} -> {local:,} bytes per rank")
        elif path in notes:
            lines.append(f"{path}: whole, because {notes[path]}")
    lines.append(f"all parameters: {whole:,} -> {total:,} bytes on rank 0 of {ranks}")
    return "\n".join(lines)


def _words(style: Style) -> str:
    given = [
        f"{name}={value!r}"
        for name in getattr(style, "__slots__", ())
        if (value := getattr(style, name)) not in (None, False)
        and (name, value) not in (("sections", 1), ("holds", "q"))
    ]
    return f"{type(style).__name__}({', '.join(given)})"


def _local_bytes(style: Style, ranks: int, own: list[nn.Parameter]) -> int:
    """Return what the largest shard takes, that of rank 0."""
    split_heads = _ranges(style, ranks)
    dim = 1 if isinstance(style, Row) else 0
    nbytes = 0
    for p in own:
        size = p.size(dim) if p.dim() > dim else None
        if size is None:  # the bias of a row layer
            nbytes += p.numel() * p.element_size()
            continue
        if split_heads is not None:
            count, mine = split_heads
            mine = size // count * mine
        else:
            sections = getattr(style, "sections", 1)
            mine = sections * bounds(size // sections, ranks, 0)[1]
        nbytes += p.numel() // max(1, size) * mine * p.element_size()
    return nbytes


def _ranges(style: Style, ranks: int) -> tuple[int, int] | None:
    """Return how many heads a layer makes or takes, over all ranks and on rank 0."""
    if not isinstance(style, Column | Row) or style.heads is None:
        return None
    divided = Heads(style.heads, style.kv_heads or style.heads, ranks)
    holds = style.holds if isinstance(style, Column) else "q"
    count = {"q": style.heads, "kv": divided.kv, "qkv": style.heads + 2 * divided.kv}[holds]
    return count, sum(b - a for a, b in divided.ranges(1, holds)[0])
