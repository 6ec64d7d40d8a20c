"""Sequence parallelism for blocks that know nothing of it: where sequences are split, gathered and joined."""

from torch import nn

from tp_shard._plans._styles import Column, Gathered, Local, Row, Sequence, Style
from tp_shard._search._trace import Region, innermost_around
from tp_shard.nn._kinds import is_linear

__all__ = ["with_sequences"]


def with_sequences(model: nn.Module, plan: dict[str, Style], regions: list[Region]) -> dict[str, Style]:
    """Return a plan under which the lists of blocks of a model work on parts of the sequence.

    Args:
        model: The model.
        plan: What is split.
        regions: The blocks' column and row layers.
    """
    split = [r for r in regions if isinstance(plan.get(r.row), Row)]
    found = dict(plan)
    lists: list[str] = []
    for path, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or any(_inside(path, other) for other in lists):
            continue
        rows = [r for r in split if _inside(r.row, path)]
        if rows:
            found[path] = Sequence()
            lists.append(path)
            for name, block in module.named_children():
                _Block(found, rows).visit(f"{path}.{name}", block, top=True)
    return found


class _Block:
    """Gives styles to what is in a block, from outside in."""

    def __init__(self, plan: dict[str, Style], rows: list[Region]) -> None:
        self._plan = plan
        self._joined = [r for r in rows if any(_is_joined(plan.get(c)) for c in r.columns)]
        self._gathers = {innermost_around(r.columns): r for r in rows if r not in self._joined}
        self._split = {name for r in rows if r not in self._joined for name in (*r.columns, r.row)}

    def visit(self, path: str, module: nn.Module, *, top: bool = False) -> None:
        """Give styles to a module and what is in it."""
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
        elif not top and not any(_inside(name, path) for name in self._split):
            self._plan[path] = Gathered(whole=True, local=style if isinstance(style, Local) else None)
            return
        for name, child in module.named_children():
            self.visit(f"{path}.{name}", child)


def _has_weights(module: nn.Module) -> bool:
    """Whether it is, or has, something that may mix places or be split: all but norms and the like."""
    return any(is_linear(m) or isinstance(m, nn.Embedding) or _is_block(m) for m in module.modules())


def _is_block(module: nn.Module) -> bool:
    return any(p is not None and p.dim() > 1 for p in module._parameters.values())


def _is_joined(style: Style | None) -> bool:
    return isinstance(style, Column) and style.gather_output


def _inside(path: str, outer: str) -> bool:
    return path.startswith(f"{outer}.")
