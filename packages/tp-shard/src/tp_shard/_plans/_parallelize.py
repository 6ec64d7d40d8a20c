"""Plans: which layers of a finished model are split, and how. A plan is data."""

from fnmatch import fnmatchcase

from torch import nn
from tp_core.errors import ConfigError, ModelError

from tp_shard._groups._group import Group, GroupLike, as_group
from tp_shard._groups._random import RandomTracker
from tp_shard._guards._refusals import guard_saving
from tp_shard._plans._gathered import gather_at, split_at
from tp_shard._plans._guarded import guard_forward
from tp_shard._plans._local import count_local_groups, make_experts, make_local
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
from tp_shard._split import Ranges, Split
from tp_shard.nn._convert import (
    Conversion,
    computes_linear,
    leave_fast_path,
    leave_nested_tensors,
    parallel_class,
)
from tp_shard.nn._heads import Heads, Holds, section_ranges
from tp_shard.nn._planned import (
    ParallelDropout,
    PlannedEmbedding,
    PlannedLinear,
    SequenceMixin,
    sequence_class,
)
from tp_shard.nn._region import remember_names
from tp_shard.nn._sequence._collectives import SequenceState
from tp_shard.nn._sequence._summed import SummedGradients
from tp_shard.nn._shapes import is_linear, is_transposed, widths

__all__ = ["check_kind", "choose", "parallelize", "style_ranges", "style_split"]


def parallelize(
    model: nn.Module,
    plan: Plan,
    *,
    sequence_dim: int | None = None,
    seed: int = 0,
    group: GroupLike = None,
) -> nn.Module:
    """Split the layers of a finished model as a plan says, in place.

    Encoder layers of torch's own leave their fast path, which reads weights past their layers.

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
        if not isinstance(style, Style):
            styles = "a Column(), Row(), Vocab(), Sequence(), Replicated(), Local(), Gathered() or Experts()"
            msg = f"the plan's {pattern!r} is {styles}, got {style!r}"
            raise ConfigError(msg)
    ranks = as_group(group)
    chosen = choose(model, plan)
    if sequence_dim is None and any(isinstance(s, Sequence | Gathered) for s in plan.values()):
        sequence_dim = -2
    if sequence_dim is not None and sequence_dim > -2:
        msg = f"sequence_dim is counted from the end and is not the features: -2 or less, got {sequence_dim}"
        raise ConfigError(msg)
    maker = _Maker(model, ranks, None if sequence_dim is None else SequenceState(sequence_dim), seed)
    maker.lists = [path for path, (module, _) in chosen.items() if isinstance(module, nn.ModuleList)]
    for path, (module, style) in chosen.items():
        check_kind(path, module, style)
    maker.check_ties({id(m): (path, style) for path, (m, style) in chosen.items()})
    _check_pairs(model, chosen, ranks)
    # Norms and attentions are changed in place: last, so that an error before leaves the model as it was.
    ordered = sorted(chosen.items(), key=lambda item: not isinstance(item[1][1], Column | Row | Vocab))
    made = {
        id(module): maker.make(path, module, style)
        for path, (module, style) in ordered
        if not isinstance(style, Gathered)
    }
    styles = {id(module): style for module, style in chosen.values()}
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if child is not None and id(child) in made:
                parent._modules[name] = made[id(child)]
                leave_fast_path(parent)
                count_local_groups(parent, styles[id(child)], ranks)
        leave_nested_tensors(parent)
    for path, (module, style) in chosen.items():
        if isinstance(style, Gathered):
            maker.make(path, module, style)  # last, for it tells the layers that are inside now
    split = made.get(id(model), model)
    maker.tie_again(split)
    _sum_together(split, ranks)
    remember_names(split)
    if ranks.size > 1:
        guard_forward(split, _blocks(chosen))
    guard_saving(split)
    return split


def _sum_together(model: nn.Module, group: Group) -> None:
    """Let the gradients of all parameters that work on parts be summed by one all-reduce."""
    summed = SummedGradients(group)
    for module in model.modules():
        if getattr(module, "summed", None) is not None:
            continue  # of a plan before this one
        if isinstance(module, SequenceMixin):
            names = list(module._parameters)
        elif isinstance(module, PlannedLinear) and module.dim == 0 and module.sequence is not None:
            names = ["bias"]
        else:
            continue
        module.summed = summed
        for name in names:
            summed.add(module, name)
    if len(summed.owners) > 1 and group.size > 1:
        model.register_forward_pre_hook(summed.begin)
        model.register_forward_hook(summed.end, always_call=True)


def _blocks(chosen: dict[str, tuple[nn.Module, Style]]) -> frozenset[str]:
    """Return the names of the modules around layers whose outputs stay split."""
    return frozenset(
        path.rpartition(".")[0]
        for path, (_, style) in chosen.items()
        if isinstance(style, Column) and not style.gather_output
    )


def _check_pairs(model: nn.Module, chosen: dict[str, tuple[nn.Module, Style]], group: Group) -> None:
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


def style_ranges(layer: nn.Module, style: Column | Row | Vocab, ranks: int) -> tuple[Ranges, ...] | None:
    """Return which features each rank has of a layer, ``None`` for even parts.

    Raises:
        ConfigError: The layer's features are not as many heads or sections as the style says.
    """
    if isinstance(style, Vocab):
        return None
    if isinstance(style, Column) and style.sections != 1:
        return section_ranges(widths(layer)[1], style.sections, ranks)
    if style.heads is None:
        return None
    kv = style.heads if style.kv_heads is None else style.kv_heads
    holds: Holds = style.holds if isinstance(style, Column) else "q"
    count = {"q": style.heads, "kv": kv, "qkv": style.heads + 2 * kv}[holds]
    size = widths(layer)[isinstance(style, Column)]
    if size % count:
        msg = f"{size} features are not {count} heads of the same size, as {style} says"
        raise ConfigError(msg)
    return Heads(style.heads, kv, ranks).ranges(size // count, holds)


def style_split(layer: nn.Module, style: Column | Row | Vocab, ranks: int) -> Split:
    """Return how the features of a layer are split."""
    size = widths(layer)[not isinstance(style, Row)]
    ranges = style_ranges(layer, style, ranks)
    return Split.even(0, size, ranks) if ranges is None else Split(0, size, ranges)


class _Maker:
    """Makes the layers of one plan."""

    def __init__(self, model: nn.Module, group: Group, sequence: SequenceState | None, seed: int) -> None:
        self._conversion = Conversion(model, group)
        self._group, self._sequence = group, sequence
        self._tracker = RandomTracker(seed, group=group)
        self._model = model
        self.lists: list[str] = []

    def _sequence_at(self, path: str) -> SequenceState | None:
        """Return what a layer knows of sequences: outside lists of blocks that split them, they are whole."""
        inside = any(path.startswith(f"{name}.") for name in self.lists)
        return self._sequence if inside or not self.lists else None

    def make(self, path: str, module: nn.Module, style: Style) -> nn.Module:
        if isinstance(style, Gathered):
            return self._gathered(path, module, style)
        if isinstance(style, Sequence) and isinstance(module, nn.ModuleList):
            if self._sequence is not None and self._group.size > 1:
                split_at(list(module), self._sequence, self._group, self._tracker)
            return module
        if isinstance(style, Sequence | Replicated):
            return self._partial(path, module, style)
        if isinstance(style, Local):
            return make_local(path, module, style, self._group)
        if isinstance(style, Experts):
            return make_experts(path, module, style, self._group)
        if isinstance(module, nn.Embedding):
            return self._embedding(path, module, 0 if isinstance(style, Vocab) else 1)
        return self._linear(path, module, style)

    def _gathered(self, path: str, module: nn.Module, style: Gathered) -> nn.Module:
        if style.local is not None:
            make_local(path, module, style.local, self._group)
        if self._sequence is not None and self._group.size > 1:
            gather_at(module, self._sequence, self._group, style.inputs, whole=style.whole)
            for layer in module.modules():  # those inside were made before
                if isinstance(layer, PlannedLinear | PlannedEmbedding):
                    layer.takes_whole = True
                    if style.whole:
                        layer.sequence = None
        return module

    def tie_again(self, model: nn.Module) -> None:
        """Give modules of others that hold a parameter of a split layer its shard, as they held the whole."""
        for module in model.modules():
            if not isinstance(module, ParallelLayer):
                for name, parameter in module._parameters.items():
                    module._parameters[name] = self._conversion.shard_of(parameter)

    def _linear(self, path: str, layer: nn.Module, style: Column | Row | Vocab) -> nn.Module:
        plain = is_transposed(layer) or computes_linear(layer)
        make = PlannedLinear if plain else parallel_class(type(layer), nn.Linear, PlannedLinear)
        ranges, gather_output = (
            style_ranges(layer, style, self._group.size),
            not isinstance(style, Row) and style.gather_output,
        )
        return self._conversion._convert(
            layer,
            lambda: make.from_plan(
                layer,
                0 if isinstance(style, Row) else -1,
                gather_output=gather_output,
                group=self._group,
                ranges=ranges,
                sequence=self._sequence_at(path),
            ),
        )

    def _embedding(self, path: str, layer: nn.Embedding, dim: int | None) -> nn.Module:
        make = parallel_class(type(layer), nn.Embedding, PlannedEmbedding)
        made = self._conversion._convert(
            layer, lambda: make.from_embedding(layer, dim, gather_output=False, group=self._group)
        )
        made.sequence = self._sequence_at(path)  # type: ignore[assignment]  # an attribute of its class
        return made

    def _partial(self, path: str, module: nn.Module, style: Sequence | Replicated) -> nn.Module:
        if isinstance(module, nn.Embedding) and isinstance(style, Sequence):
            return self._embedding(path, module, None)
        if isinstance(module, nn.Dropout):
            made = ParallelDropout(module.p, module.inplace, tracker=self._tracker)
            made.__dict__.update({k: v for k, v in module.__dict__.items() if k not in ("p", "inplace")})
            return made
        module.__class__ = sequence_class(type(module))
        module.sequence_group = self._group  # type: ignore[assignment]  # an attribute of its class
        module.part_of = "sequence" if isinstance(style, Sequence) else "features"  # type: ignore[assignment]  # as above
        return module

    def check_ties(self, chosen: dict[int, tuple[str, Style]]) -> None:
        """Make sure that whoever shares a weight is split alike, before anything is put in place."""
        for module in self._model.modules():
            if id(module) not in chosen or not isinstance(chosen[id(module)][1], Column | Row | Vocab):
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
