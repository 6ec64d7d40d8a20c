"""Describing in words what a plan does to a model."""

from collections.abc import Mapping

from torch import nn

from tp_shard._plans._cuts import style_split
from tp_shard._plans._styles import Column, Experts, Local, Plan, Row, Style, Vocab

__all__ = ["describe", "words"]


def describe(model: nn.Module, plan: Plan, notes: Mapping[str, str], ranks: int) -> str:
    """Return a line for each module that a plan or a note names, and one for all parameters."""
    lines: list[str] = []
    seen: set[int] = set()
    total = whole = 0
    for path, module in model.named_modules():
        own = {n: p for n, p in module._parameters.items() if p is not None and id(p) not in seen}
        seen.update(map(id, own.values()))
        full = sum(p.numel() * p.element_size() for p in own.values())
        style = plan.get(path)
        local = sum(
            int(p.numel() * _share(module, style, n, p, ranks)) * p.element_size() for n, p in own.items()
        )
        whole, total = whole + full, total + local
        if style is not None:
            lines.append(f"{path}: {words(style)}, {full:,} -> {local:,} bytes per rank")
        if path in notes:
            lines.append(
                f"{path}: whole, because {notes[path]}" if style is None else f"{path}: {notes[path]}"
            )
    lines.append(f"all parameters: {whole:,} -> {total:,} bytes on rank 0 of {ranks}")
    return "\n".join(lines)


def words(style: Style) -> str:
    """Return a style as one would write it."""
    kind = type(style)
    usual = {name: getattr(_usual(style), name, None) for name in kind.__slots__}
    given = [
        f"{name}={value!r}"
        for name in usual
        if (value := getattr(style, name)) != usual[name] and value is not None
    ]
    return f"{kind.__name__}({', '.join(given)})"


def _usual(style: Style) -> object:
    """Return the style with nothing but defaults."""
    if isinstance(style, Local):
        return Local(heads=0)
    return type(style)()


def _share(module: nn.Module, style: Style | None, name: str, p: nn.Parameter, ranks: int) -> float:
    """Return how much of a parameter rank 0 has, which has the largest part."""
    if isinstance(style, Experts):
        return 1 / ranks if name in (*style.columns, *style.rows) else 1.0
    if not isinstance(style, Column | Row | Vocab) or (isinstance(style, Row) and p.dim() == 1):
        return 1.0
    if isinstance(style, Vocab) and isinstance(module, nn.Embedding):
        return -(-p.size(0) // ranks) / p.size(0)
    split = style_split(module, style, ranks)
    return split.local_size(0) / max(1, split.size)
