"""Going by names and shapes of layers, where a model cannot be run as a whole; tried block by block."""

import re
from collections.abc import Iterator

from torch import nn
from tp_core.errors import ConfigError

from tp_shard._plans._styles import Column, Plan, Replicated, Row, Style
from tp_shard._search._probe import Finding, probe
from tp_shard._search._vocabulary import refusal
from tp_shard.nn._heads import Heads

__all__ = ["by_names"]

_HEADS = ("num_heads", "n_head", "n_heads", "num_attention_heads", "heads", "nhead")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head", "kv_heads")
_QKV = re.compile(r"(w?qkv|qkv_proj|c_attn|query_key_value|in_proj)$")
_Q = re.compile(r"(q_proj|q|query|wq|to_q)$")
_KV = re.compile(r"(k_proj|v_proj|k|v|key|value|wk|wv|to_k|to_v)$")
_OUT = re.compile(r"(o_proj|out_proj|out|proj|c_proj|wo|to_out|dense|o)$")
_GATE_UP = re.compile(r"(gate_up|gate_up_proj|w13)$")
_UP = re.compile(r"(gate_proj|up_proj|gate|up|fc1|c_fc|w1|w3|fc_in|linear1|dense_h_to_4h|intermediate)$")
_DOWN = re.compile(r"(down_proj|down|fc2|c_proj|w2|fc_out|linear2|dense_4h_to_h|proj)$")
_HEAD_NORM = re.compile(r"((q|k|query|key)_?(layer)?_?(norm|ln)|(layer)?_?(norm|ln)_?(q|k|query|key))$")


def by_names(model: nn.Module, ranks: int, notes: dict[str, str]) -> dict[str, Style]:
    """Return what of a model's blocks can be split, each tried alone on random numbers.

    Args:
        model: The model.
        ranks: How many ranks there are.
        notes: Gets why a block stays whole, by its name.
    """
    plan: dict[str, Style] = {}
    findings: dict[object, Finding] = {}
    for path, module in model.named_modules():
        linears = {n: m for n, m in module.named_children() if isinstance(m, nn.Linear)}
        if isinstance(module, nn.MultiheadAttention):
            notes[path] = "torch's own attention reads its weights past its layers"
            continue
        heads = _heads(model, path)
        styles = dict(_pair(linears, heads, ranks, notes, path))
        if not styles:
            continue
        key = _structure(module, styles)
        if key not in findings:
            findings[key] = _prove(module, styles, ranks)
        if findings[key].reason is not None:
            notes[path] = str(findings[key].reason)
            continue
        for name, style in {**styles, **findings[key].inside}.items():
            plan[f"{path}.{name}" if path else name] = style
    return plan


def _pair(
    linears: dict[str, nn.Linear],
    heads: tuple[int, int] | None,
    ranks: int,
    notes: dict[str, str],
    path: str,
) -> Iterator[tuple[str, Style]]:
    """Yield what becomes of an attention's or an MLP's layers, if all of them are recognized."""
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


def _structure(module: nn.Module, styles: Plan) -> object:
    """Return what blocks have in common that are split alike."""
    shapes = tuple((name, tuple(p.shape)) for name, p in module.named_parameters())
    return type(module), shapes, tuple(styles.items())


def _prove(module: nn.Module, styles: dict[str, Style], ranks: int) -> Finding:
    """Return whether a block can be split so, and how what stands inside is treated."""
    for name in styles:
        reason = refusal(module.get_submodule(name))
        if reason is not None:
            return Finding(False, reason)
    found = probe(module, styles, ranks)
    if found.ran:
        return found
    fused = [
        name
        for name, style in styles.items()
        if isinstance(style, Column) and (style.holds == "qkv" or style.sections != 1)
    ]
    if fused:
        return Finding(
            False,
            f"the order of the features of {', '.join(fused)} is not known, and its forward could not be "
            f"tried alone ({found.reason}); write Column(heads=..., holds='qkv') for queries, keys and "
            "values behind one another, Column(heads=...) for one head's behind another's",
        )
    return _by_names(module, styles)


def _by_names(module: nn.Module, styles: dict[str, Style]) -> Finding:
    """Go by names and shapes for a block that cannot be run alone."""
    row, style = next((module.get_submodule(n), s) for n, s in styles.items() if isinstance(s, Row))
    own = [name for name, p in module._parameters.items() if p is not None]
    if own and style.heads is not None:
        return Finding(False, f"its own parameters {', '.join(own)} may count all heads")
    inside: dict[str, Style] = {}
    for name, child in module.named_children():
        parameters = list(child.parameters())
        if style.heads is None or not _HEAD_NORM.match(name) or not parameters:
            continue
        width = row.in_features // style.heads  # type: ignore[operator]  # an int, which torch's module types hide
        if any(p.shape != (width,) for p in parameters) or any(True for _ in child.children()):
            return Finding(False, f"{name} works on all heads at once")
        inside[name] = Replicated()
    return Finding(False, None, inside)


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
