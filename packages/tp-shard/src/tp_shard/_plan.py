"""Plans: which layers of a finished model are split, and how. A plan is data."""

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TypeAlias

from torch import nn
from tp_core.errors import ConfigError, ModelError

from tp_shard._group import Group, GroupLike, as_group
from tp_shard._random import RandomTracker
from tp_shard._split import Ranges
from tp_shard.nn._convert import Conversion, parallel_class
from tp_shard.nn._heads import Heads, Holds, section_ranges
from tp_shard.nn._layer import ParallelLayer
from tp_shard.nn._planned import (
    ParallelDropout,
    PlannedEmbedding,
    PlannedLinear,
    SequenceMixin,
    sequence_class,
)
from tp_shard.nn._sequence import SequenceState

__all__ = ["Column", "Plan", "Row", "Sequence", "Style", "Vocab", "parallelize"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A linear layer whose output features are split.

    Attributes:
        gather_output: Whether outputs are joined, so that anything can follow.
        sections: How many equal layers it fuses, each of which is split: 2 for a gate and an up layer.
        heads: The number of query heads, which stay whole.
        kv_heads: The number of key heads; as many by default. If they are fewer than the ranks,
            several ranks hold the same one.
        holds: Which heads it makes: "q", "kv" for keys or values, "qkv" for all in one.
    """

    gather_output: bool = False
    sections: int = 1
    heads: int | None = None
    kv_heads: int | None = None
    holds: Holds = "q"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A linear layer whose input features are split.

    Attributes:
        heads: The number of query heads, if it takes those of a head-parallel attention.
        kv_heads: The number of key heads; as many by default.
    """

    heads: int | None = None
    kv_heads: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocab:
    """An embedding, or a linear head, whose classes are split; tied ones stay tied.

    Attributes:
        gather_output: Whether a head's logits are joined; without it they go to a parallel loss.
    """

    gather_output: bool = False


@dataclass(frozen=True, slots=True)
class Sequence:
    """What works on a part of the sequence: a norm, a dropout, an embedding of positions.

    Norms get the sum of the ranks' gradients, dropouts draw from the rank's own random numbers, the
    output of an embedding is split.
    """


Style: TypeAlias = Column | Row | Vocab | Sequence
Plan: TypeAlias = Mapping[str, Style]


def parallelize(
    model: nn.Module,
    plan: Plan,
    *,
    sequence_dim: int | None = None,
    seed: int = 0,
    group: GroupLike = None,
) -> nn.Module:
    """Split the layers of a finished model as a plan says, in place.

    Names are those of ``model.named_modules()``; in a pattern ``*`` stands for one part of a name (or
    some letters in it), ``**`` for any number of parts. The first pattern that fits counts.

    Args:
        model: The model, with the same values on all ranks.
        plan: What becomes of which layer, such as ``{"layers.*.attn.qkv": Column(heads=8, holds="qkv"),
            "layers.*.attn.out": Row(heads=8), "lm_head": Vocab()}``.
        sequence_dim: Which dimension the sequence is, counted from the end, for sequence parallelism:
            between row and column layers each rank has a part of it. -2 by default, if the plan has a
            :class:`Sequence`.
        seed: For dropouts that differ between ranks; the same on all ranks.
        group: The ranks; the current model-parallel group by default.

    Returns:
        The model; a new module if it is a single layer that the plan names "".

    Raises:
        ConfigError: A pattern fits no layer, or a layer cannot be split as its style says.
        ModelError: A layer is of another kind than its style is for, shares its weight with one that
            is not split alike, or the model is wrapped.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8))
        >>> parallelize(model, {"0": Column(), "2": Row()})(torch.ones(1, 8)).shape
        torch.Size([1, 8])
    """
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        msg = f"the model is wrapped in {type(model).__name__}; parallelize the plain one and wrap it then"
        raise ModelError(msg)
    for pattern, style in plan.items():
        if not isinstance(style, Column | Row | Vocab | Sequence):
            msg = f"the plan's {pattern!r} is a Column(), Row(), Vocab() or Sequence(), got {style!r}"
            raise ConfigError(msg)
    ranks = as_group(group)
    chosen = _choose(model, plan)
    if sequence_dim is None and any(isinstance(s, Sequence) for s in plan.values()):
        sequence_dim = -2
    if sequence_dim is not None and sequence_dim > -2:
        msg = f"sequence_dim is counted from the end and is not the features: -2 or less, got {sequence_dim}"
        raise ConfigError(msg)
    maker = _Maker(model, ranks, None if sequence_dim is None else SequenceState(sequence_dim), seed)
    for path, (module, style) in chosen.items():
        check_kind(path, module, style)
    maker.check_ties({id(m): (path, style) for path, (m, style) in chosen.items()})
    # Norms are changed where they are: last, so that an error before leaves the model as it was.
    ordered = sorted(chosen.values(), key=lambda item: isinstance(item[1], Sequence))
    made = {id(module): maker.make(module, style) for module, style in ordered}
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if child is not None and id(child) in made:
                parent._modules[name] = made[id(child)]
    return made.get(id(model), model)


def _choose(model: nn.Module, plan: Plan) -> dict[str, tuple[nn.Module, Style]]:
    chosen: dict[str, tuple[nn.Module, Style]] = {}
    used: set[str] = set()
    for path, module in model.named_modules():
        fitting = [p for p in plan if _fits(p.split("."), path.split("."))]
        used.update(fitting)
        if fitting:
            chosen[path] = module, plan[fitting[0]]
    unused = [pattern for pattern in plan if pattern not in used]
    if unused:
        names = [path for path, m in model.named_modules() if path and not list(m.children())]
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
        ModelError: It is not.
    """
    kind = type(module).__name__
    if isinstance(module, ParallelLayer | SequenceMixin | ParallelDropout):
        msg = f"{path} is split already: {module}"
        raise ModelError(msg)
    if isinstance(style, Sequence):
        if isinstance(module, nn.Linear) or any(m is not module for m in module.modules()):
            msg = f"{path} is a {kind}; Sequence() is for single norms, dropouts and embeddings"
            raise ModelError(msg)
        return
    kinds = (nn.Linear, nn.Embedding) if isinstance(style, Vocab) else (nn.Linear,)
    if not isinstance(module, kinds):
        names = " or ".join(f"nn.{k.__name__}" for k in kinds)
        msg = f"{path} is a {kind}, and {style} is for an {names}"
        raise ModelError(msg)


class _Maker:
    """Makes the layers of one plan."""

    def __init__(self, model: nn.Module, group: Group, sequence: SequenceState | None, seed: int) -> None:
        self._conversion = Conversion(model, group)
        self._group, self._sequence = group, sequence
        self._tracker = RandomTracker(seed, group=group)
        self._model = model

    def make(self, module: nn.Module, style: Style) -> nn.Module:
        if isinstance(style, Sequence):
            return self._sequential(module)
        if isinstance(module, nn.Embedding):
            return self._embedding(module, 0)
        return self._linear(module, style)  # type: ignore[arg-type]  # check_kind made sure

    def _linear(self, layer: nn.Linear, style: Column | Row | Vocab) -> nn.Module:
        make = parallel_class(type(layer), nn.Linear, PlannedLinear)
        ranges, gather_output = self._ranges(layer, style), not isinstance(style, Row) and style.gather_output
        return self._conversion._convert(
            layer,
            lambda: make.from_plan(
                layer,
                0 if isinstance(style, Row) else -1,
                gather_output=gather_output,
                group=self._group,
                ranges=ranges,
                sequence=self._sequence,
            ),
        )

    def _embedding(self, layer: nn.Embedding, dim: int | None) -> nn.Module:
        make = parallel_class(type(layer), nn.Embedding, PlannedEmbedding)
        made = self._conversion._convert(
            layer, lambda: make.from_embedding(layer, dim, gather_output=False, group=self._group)
        )
        made.sequence = self._sequence  # type: ignore[assignment]  # an attribute of its class
        return made

    def _ranges(self, layer: nn.Linear, style: Column | Row | Vocab) -> tuple[Ranges, ...] | None:
        ranks = self._group.size
        if isinstance(style, Vocab):
            return None
        if isinstance(style, Column) and style.sections != 1:
            return section_ranges(layer.out_features, style.sections, ranks)
        if style.heads is None:
            return None
        kv = style.heads if style.kv_heads is None else style.kv_heads
        holds: Holds = style.holds if isinstance(style, Column) else "q"
        count = {"q": style.heads, "kv": kv, "qkv": style.heads + 2 * kv}[holds]
        size = layer.out_features if isinstance(style, Column) else layer.in_features
        if size % count:
            msg = f"{size} features are not {count} heads of the same size, as {style} says"
            raise ConfigError(msg)
        return Heads(style.heads, kv, ranks).ranges(size // count, holds)

    def _sequential(self, module: nn.Module) -> nn.Module:
        if isinstance(module, nn.Embedding):
            return self._embedding(module, None)
        if isinstance(module, nn.Dropout):
            made = ParallelDropout(module.p, module.inplace, tracker=self._tracker)
            made.__dict__.update({k: v for k, v in module.__dict__.items() if k not in ("p", "inplace")})
            return made
        module.__class__ = sequence_class(type(module))
        module.sequence_group = self._group  # type: ignore[assignment]  # an attribute of its class
        return module

    def check_ties(self, chosen: dict[int, tuple[str, Style]]) -> None:
        """Make sure that whoever shares a weight is split alike, before anything is put in place."""
        for module in self._model.modules():
            if id(module) not in chosen or isinstance(chosen[id(module)][1], Sequence):
                continue
            path, style = chosen[id(module)]
            for other_path, other in self._conversion.partners(module):
                same = chosen.get(id(other), (None, None))[1]
                if type(same) is not type(style):
                    msg = (
                        f"{path or 'the layer'} shares its weight with {other_path}, which the plan does "
                        f"not split alike; give it {type(style).__name__}() too, or untie them"
                    )
                    raise ModelError(msg)
