"""Describing in words what a plan does to a model."""

import re
from collections.abc import Mapping

from torch import nn

from tp_shard._plans._cuts import style_split
from tp_shard._plans._styles import Column, Experts, Local, Plan, Row, Style, Vocab
from tp_shard.nn._kinds import is_linear

__all__ = ["describe", "reasons", "words"]

_SMALL = 0.01  # of the weights: norms and biases, which are not worth a line


def describe(model: nn.Module, plan: Plan, notes: Mapping[str, str], ranks: int) -> str:
    """Return how much of a model a plan splits, and a line for all that it names, or that stays whole."""
    lines: list[str] = []
    seen: set[int] = set()
    total = whole = split = count = 0
    left: dict[tuple[str, str], int] = {}  # by the names and kinds of modules, without numbers
    why: dict[tuple[str, str], str] = {}
    for path, module in model.named_modules():
        own = {n: p for n, p in module._parameters.items() if p is not None and id(p) not in seen}
        seen.update(map(id, own.values()))
        full = sum(p.numel() * p.element_size() for p in own.values())
        style = plan.get(path)
        local = sum(
            int(p.numel() * _share(module, style, n, p, ranks)) * p.element_size() for n, p in own.items()
        )
        whole, total = whole + full, total + local
        kept = sum(p.numel() for n, p in own.items() if _share(module, style, n, p, max(2, ranks)) == 1)
        count += sum(p.numel() for p in own.values())
        split += sum(p.numel() for p in own.values()) - kept
        if style is not None:
            lines.append(f"{path}: {words(style)}, {full:,} -> {local:,} bytes per rank")
        elif kept:
            key = re.sub(r"\b\d+\b", "*", path), type(module).__name__
            left[key] = left.get(key, 0) + kept
            why.setdefault(key, re.sub(r"(?<!\d)\.\d+\b", ".*", _reason(path, module, notes)))
        if path in notes and (style is not None or not own):
            lines.append(
                f"{path}: whole, because {notes[path]}" if style is None else f"{path}: {notes[path]}"
            )
    big = sorted((key for key in left if left[key] >= _SMALL * count), key=lambda key: -left[key])
    lines += [
        f"{key[0] or 'the model'}: whole, because {why[key]} ({key[1]}, {left[key] / count:.1%} of "
        "the weights)"
        for key in big
    ]
    bytes_of = f"{whole:,} -> {total:,} bytes on rank 0 of {ranks}"
    first = f"{split / max(1, count):.1%} of the weights are split, all parameters: {bytes_of}"
    return "\n".join([first, *lines])


def reasons(notes: Mapping[str, str], most: int = 5) -> str:
    """Return notes as one text, those of blocks that are alike once."""
    found: dict[tuple[str, str], None] = {}
    for path, reason in notes.items():
        found[re.sub(r"\b\d+\b", "*", path), re.sub(r"(?<!\d)\.\d+\b", ".*", reason)] = None
    texts = [f"{place or 'the model'}: {reason}" for place, reason in found]
    return "; ".join(texts[:most]) + (f"; and {len(texts) - most} more" if len(texts) > most else "")


def _reason(path: str, module: nn.Module, notes: Mapping[str, str]) -> str:
    if path in notes:
        return notes[path]
    if not is_linear(module) and not isinstance(module, nn.Embedding):
        return "only linear layers, embeddings and experts are split"
    for around in _around(path):
        if around in notes:
            return f"{around or 'the model'} is: {notes[around]}"
    return "nothing calls its forward" if is_linear(module) else "it is no table of the vocabulary"


def _around(path: str) -> list[str]:
    parts = path.split(".")[:-1]
    return [".".join(parts[:n]) for n in range(len(parts), -1, -1)]


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
    if isinstance(style, Local) and name in style.parameters:
        return 1 / ranks
    if not isinstance(style, Column | Row | Vocab) or (isinstance(style, Row) and p.dim() == 1):
        return 1.0
    if isinstance(style, Vocab) and isinstance(module, nn.Embedding):
        return -(-p.size(0) // ranks) / p.size(0)
    split = style_split(module, style, ranks)
    return split.local_size(0) / max(1, split.size)
