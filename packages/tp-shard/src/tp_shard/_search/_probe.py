"""A proof on one process that a block of a model can be split as a plan proposes.

The block's own code runs once on what its column layers would make, and once for each rank on that rank's
part of it. What then reaches the row layer has to be the rank's part of what reaches it in one piece. So the
order of fused projections, and code that counts heads, are found out and not guessed by names.
"""

import copy
import inspect
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tp_shard._groups import _group
from tp_shard._groups._group import ALONE, Group
from tp_shard._plans._cuts import style_split
from tp_shard._plans._local import count_local_groups
from tp_shard._plans._styles import Column, Replicated, Row, Style
from tp_shard._verify._call import first_line

__all__ = ["Finding", "probe"]


@dataclass(frozen=True, slots=True)
class Finding:
    """What running a block has shown.

    Attributes:
        ran: Whether its ``forward`` could be called at all.
        reason: Why the block cannot be split so, or could not be called.
        inside: What stands between its column and row layers, by name, and how that is treated.
    """

    ran: bool
    reason: str | None = None
    inside: Mapping[str, Style] = field(default_factory=dict)


class _ReachedError(Exception):
    """The row layer was called: the rest of the block does not matter."""


def probe(block: nn.Module, styles: Mapping[str, Style], ranks: int) -> Finding:
    """Run a copy of a block, whole and in parts, on random numbers.

    Args:
        block: A module; it is not changed, nor are torch's random numbers.
        styles: What becomes of some of its own linear layers, by name; one of them a row layer.
        ranks: How many parts there are.

    Collectives: none.
    """
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]), torch.enable_grad():
        warnings.simplefilter("ignore")  # the model's own, which its user meets in training
        torch.default_generator.manual_seed(0)  # torch.manual_seed would seed accelerators, too
        return _Probe(block, styles, ranks).run()


class _Probe:
    def __init__(self, block: nn.Module, styles: Mapping[str, Style], ranks: int) -> None:
        self._block, self._styles, self._ranks = block, styles, ranks
        self._row = next(name for name, style in styles.items() if isinstance(style, Row))
        self._columns = [name for name, style in styles.items() if isinstance(style, Column)]
        self._given: dict[str, Tensor] = {}
        self._reached: Tensor | None = None

    def run(self) -> Finding:
        finding = Finding(False)
        for shape in ((1, 4), (4,)):  # a sequence; a batch of vectors
            self._given = {}
            try:
                copied, x = self._copy(), self._input(shape)
                arguments = self._arguments(copied, x)
                whole = self._call(copied, arguments, ALONE)
            except Exception as error:  # noqa: BLE001 - whatever the block needs, it was not given
                finding = finding if finding.reason else Finding(False, first_line(error))
                continue
            return self._compare(copied, arguments, whole, x)
        return finding

    def _compare(
        self, copied: nn.Module, arguments: dict[str, Any], whole: Tensor | None, x: Tensor
    ) -> Finding:
        size = self._block.get_submodule(self._row).in_features
        if whole is None or whole.size(-1) != size:
            return Finding(False, f"its forward does not hand {size} features to {self._row}")
        found = self._inside(copied, whole, x)
        return found if found.reason is not None else self._parts(copied, arguments, whole, found)

    def _parts(self, copied: nn.Module, arguments: dict[str, Any], whole: Tensor, found: Finding) -> Finding:
        dropouts: set[str] = set()
        for parameter in copied.parameters():
            parameter.requires_grad_(False)
        arguments = {k: v.detach() if isinstance(v, Tensor) else v for k, v in arguments.items()}
        hooks = [
            module.register_forward_pre_hook(lambda _, args, n=name: self._note_dropout(dropouts, args, n))
            for name, module in copied.named_modules()
            if isinstance(module, nn.Dropout)
        ]
        made = dict(self._given)
        for rank in range(self._ranks):
            self._given = {name: self._take(name, made[name], rank) for name in self._columns}
            group = Group(rank, self._ranks)
            for name in self._columns:
                count_local_groups(copied, self._styles[name], group)
            try:
                part = self._call(copied, arguments, group)
            except Exception as error:  # noqa: BLE001 - as above
                return Finding(
                    True,
                    f"its forward does not work on one rank's part ({first_line(error)}); where it counts "
                    "all heads itself, let it count those of its rank and write the plan by hand",
                )
            expected = self._take(self._row, whole.detach(), rank)
            if part is None or part.shape != expected.shape or not torch.allclose(part, expected, 1e-3, 1e-4):
                return Finding(
                    True,
                    f"rank {rank} of {self._ranks} would not make its part of what {self._row} takes: "
                    f"{', '.join(self._columns)} hold their features in another order, or what follows mixes "
                    "them; write the plan by hand",
                )
        for hook in hooks:
            hook.remove()
        return Finding(True, None, {**found.inside, **{name: Replicated() for name in sorted(dropouts)}})

    def _inside(self, copied: nn.Module, whole: Tensor, x: Tensor) -> Finding:
        """Find the parameters between column and row layers, by their gradients."""
        own = {name: p for name, p in copied.named_parameters() if p.requires_grad}
        total = whole.sum() + whole.square().sum()
        gradients = torch.autograd.grad(total, [x, *own.values()], allow_unused=True)
        if gradients[0] is not None:
            return Finding(True, f"its input goes to {self._row} past {', '.join(self._columns)}, too")
        inside: dict[str, Style] = {}
        for name, gradient in zip(own, gradients[1:], strict=True):
            if gradient is None:
                continue
            owner = name.rpartition(".")[0]
            if not owner or any(True for _ in copied.get_submodule(owner).children()):
                return Finding(True, f"its own parameter {name} stands between column and row layers")
            inside[owner] = Replicated()
        return Finding(True, None, inside)

    def _copy(self) -> nn.Module:
        """Return a copy in float32 on the CPU; the weights of its split layers take no memory."""
        memo: dict[int, Any] = {}
        for name in self._styles:
            for p in self._block.get_submodule(name).parameters():
                memo[id(p)] = nn.Parameter(torch.zeros(()).expand(p.shape), requires_grad=False)
        for p in self._block.parameters():
            if id(p) not in memo:
                memo[id(p)] = nn.Parameter(torch.randn(p.shape))
        copied = copy.deepcopy(self._block, memo).float().cpu().eval()
        for name in self._columns:
            copied.get_submodule(name).forward = lambda x, n=name: self._make(n, x)
        copied.get_submodule(self._row).forward = self._reach
        return copied

    def _input(self, shape: tuple[int, ...]) -> Tensor:
        width: Any = self._block.get_submodule(self._columns[0]).in_features
        return torch.randn(*shape, width, requires_grad=True)

    def _arguments(self, copied: nn.Module, x: Tensor) -> dict[str, Any]:
        """Return what a block of a usual transformer is called with; what is left out is its own affair."""
        names = list(inspect.signature(copied.forward).parameters.items())
        arguments: dict[str, Any] = {}
        for index, (name, parameter) in enumerate(names):
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                continue
            if index == 0:
                arguments[name] = x
            elif name == "position_embeddings":
                head = self._head_features()
                arguments[name] = torch.randn(1, 4, head), torch.randn(1, 4, head)
            elif name == "position_ids":
                arguments[name] = torch.arange(x.size(-2)).unsqueeze(0)
            elif parameter.default is parameter.empty:
                arguments[name] = None
        return arguments

    def _head_features(self) -> int:
        style: Any = self._styles[self._row]
        width: Any = self._block.get_submodule(self._row).in_features
        return int(width) // (style.heads or 1)

    def _call(self, copied: nn.Module, arguments: dict[str, Any], group: Group) -> Tensor | None:
        self._reached = None
        for name in self._styles:
            copied.get_submodule(name).group = group  # type: ignore[assignment]  # as split layers have it
        with _current(group), suppress(_ReachedError):
            copied(**arguments)
        return self._reached

    def _make(self, name: str, x: Tensor) -> Tensor:
        if name not in self._given:
            width: Any = self._block.get_submodule(name).out_features
            self._given[name] = torch.randn(*x.shape[:-1], width, requires_grad=True)
        return self._given[name]

    def _reach(self, x: Tensor) -> Tensor:
        self._reached = x
        raise _ReachedError

    def _take(self, name: str, tensor: Tensor, rank: int) -> Tensor:
        layer, style = self._block.get_submodule(name), self._styles[name]
        split = style_split(layer, style, self._ranks)  # type: ignore[arg-type]  # a column or a row layer
        pieces = [tensor[..., a:b] for a, b in split.ranges[rank]]
        return torch.cat(pieces, -1).detach().requires_grad_(isinstance(style, Column))

    @staticmethod
    def _note_dropout(names: set[str], args: tuple[Any, ...], name: str) -> None:
        if args and isinstance(args[0], Tensor) and args[0].requires_grad:
            names.add(name)


@contextmanager
def _current(group: Group) -> Iterator[None]:
    """Let the model's own code believe that this group is the current one."""
    current = _group._current
    before = current.tensor, current.data
    _group.set_groups(group, current.data)
    try:
        yield
    finally:
        _group.set_groups(*before)
