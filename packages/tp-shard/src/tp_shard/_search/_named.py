"""A proof on one process that a block of a model can be split as a plan proposes.

The block's own code runs once on what its column layers would make, and once for each rank on that rank's
part of it. What then reaches the row layer has to be the rank's part of what reaches it in one piece. So the
order of fused projections, and code that counts heads, are found out and not guessed by names.
"""

import copy
import inspect
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from tp_core.errors import ConfigError

from tp_shard._groups import _group
from tp_shard._groups._group import ALONE, Group
from tp_shard._plans._cuts import style_split
from tp_shard._plans._local import count_local_groups
from tp_shard._plans._styles import Column, Plan, Replicated, Row, Style
from tp_shard._search._variants import refusal
from tp_shard._verify._call import first_line
from tp_shard.nn._heads import Heads


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


# -- Going by names and shapes of layers, where a model cannot be run as a whole; tried block by block


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
