"""The modules that a plan names, the features of each rank, and the layers that replace the modules."""

from fnmatch import fnmatchcase

from torch import nn
from tp_core.errors import ConfigError, ModelError
from tp_core.modules import mix_in

from tp_shard._groups._group import Group
from tp_shard._groups._random import RandomTracker
from tp_shard._plans._adapters import AdaptedMixin, is_adapted, refusal_of_adapters, split_adapters
from tp_shard._plans._modules import draw_replicated, gather_at, make_experts, make_local, split_at
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
from tp_shard._shards import ParallelLayer
from tp_shard._split import Ranges, Split
from tp_shard.nn._convert import (
    Conversion,
    computes_linear,
    is_linear,
    is_transposed,
    parallel_class,
    why_not_split,
    widths,
)
from tp_shard.nn._heads import Heads, Holds, section_ranges
from tp_shard.nn._own_forward import check_own_forward
from tp_shard.nn._planned import ParallelDropout, PlannedEmbedding, PlannedLinear, SequenceMixin
from tp_shard.nn._sequence import SequenceState


def style_ranges(layer: nn.Module, style: Column | Row | Vocab, ranks: int) -> tuple[Ranges, ...] | None:
    """Return the features of a layer that each rank has, ``None`` for an even split."""
    if isinstance(style, Vocab):
        return None
    if isinstance(style, Column) and style.sections != 1:
        return section_ranges(widths(layer)[1], style.sections, ranks)
    if style.heads is None:
        return None
    kv = style.heads if style.kv_heads is None else style.kv_heads
    in_features, out_features = widths(layer)
    size = in_features
    holds: Holds = "q"
    if isinstance(style, Column):
        size = out_features
        holds = style.holds
    count = {"q": style.heads, "kv": kv, "qkv": style.heads + 2 * kv}[holds]
    if size % count:
        msg = f"{size} features are not {count} heads of the same size, as {style} says"
        raise ConfigError(msg)
    return Heads(style.heads, kv, ranks).ranges(size // count, holds)


def style_split(layer: nn.Module, style: Column | Row | Vocab, ranks: int) -> Split:
    in_features, out_features = widths(layer)
    size = in_features if isinstance(style, Row) else out_features
    ranges = style_ranges(layer, style, ranks)
    if ranges is None:
        return Split.even(0, size, ranks)
    return Split(0, size, ranges)


# -- The modules that a plan names, and checks of their styles ------------------------------------


def check_pairs(model: nn.Module, chosen: dict[str, tuple[nn.Module, Style]], group: Group) -> None:
    """Raise if a layer beside a column layer would take its split outputs as whole ones."""
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
                    f"{before}{name} is {style} and splits its outputs, and {before}{takers[-1]} beside it "
                    f"would take all {width} of them: give that one Row(), or {name} "
                    "Column(gather_output=True)"
                )
                raise ConfigError(msg)


def choose(model: nn.Module, plan: Plan) -> dict[str, tuple[nn.Module, Style]]:
    """Return the modules that a plan names, by their names, each with its style."""
    chosen: dict[str, tuple[nn.Module, Style]] = {}
    used: set[str] = set()
    for path, module in model.named_modules():
        fitting = [p for p in plan if _fits(p.split("."), path.split("."))]
        used.update(fitting)
        if fitting:
            chosen[path] = module, plan[fitting[0]]
    unused = [pattern for pattern in plan if pattern not in used]
    if unused:
        names = [repr(path) for path, m in model.named_modules() if path and not list(m.children())]
        if len(names) > 20:
            names = [*names[:20], "..."]
        msg = f"the plan's {unused} fit no layer; the layers are {', '.join(names)}"
        raise ConfigError(msg)
    return chosen


def _fits(pattern: list[str], path: list[str]) -> bool:
    if not pattern or not path:
        return pattern in ([], ["**"]) and not path
    if pattern[0] == "**":
        return _fits(pattern[1:], path) or _fits(pattern, path[1:])
    return fnmatchcase(path[0], pattern[0]) and _fits(pattern[1:], path[1:])


def check_kind(path: str, module: nn.Module, style: Style) -> None:
    kind = type(module).__name__
    if isinstance(module, ParallelLayer | SequenceMixin | ParallelDropout | AdaptedMixin):
        msg = f"{path} is split already: {module}"
        raise ModelError(msg)
    reason = None
    if isinstance(style, Column | Row | Vocab):
        if is_adapted(module):
            reason_for = refusal_of_adapters
        else:
            reason_for = why_not_split
        reason = reason_for(module)
    if reason is not None:
        msg = f"{path or 'the layer'} cannot be split: {reason}"
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
    # A table of positions by head is split like a column layer with heads.
    takes_tables = isinstance(style, Vocab) or (isinstance(style, Column) and style.heads is not None)
    if not is_linear(module) and not (takes_tables and isinstance(module, nn.Embedding)):
        if is_linear(getattr(module, "base_layer", module)):
            msg = (
                f"{path} cannot be split: its adapter ({type(module).__module__}.{kind}) computes more than "
                "LoRA, DoRA or IA3; leave the layer out of the plan, and it stays whole"
            )
            raise ModelError(msg)
        if isinstance(style, Vocab):
            names = "nn.Linear or nn.Embedding"
        else:
            names = "nn.Linear"
        msg = f"{path} is a {kind}, and {style} is for an {names}"
        raise ModelError(msg)


class Maker:
    """The maker of the layers of one plan."""

    def __init__(self, model: nn.Module, group: Group, sequence: SequenceState | None, seed: int) -> None:
        self._conversion = Conversion(model, group)
        self._group = group
        self._sequence = sequence
        self._tracker = RandomTracker(seed, group=group)
        self._model = model
        self.lists: list[str] = []
        self.wholes: list[str] = []

    def _sequence_at(self, path: str) -> SequenceState | None:
        """Return the sequence state for a layer, ``None`` where it works on whole sequences."""
        inside = any(path.startswith(f"{name}.") for name in self.lists)
        is_whole = any(path == name or path.startswith(f"{name}.") for name in self.wholes)
        if is_whole or (self.lists and not inside):
            return None
        return self._sequence

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
            dim = 0 if isinstance(style, Vocab) else 1
            return self._embedding(path, module, dim)
        if is_adapted(module):
            split = style_split(module, style, self._group.size)
            has_parts = self._sequence_at(path) is not None
            return split_adapters(module, style, split, self._group, has_parts=has_parts)
        return self._linear(path, module, style)

    def _gathered(self, path: str, module: nn.Module, style: Gathered) -> nn.Module:
        if style.local is not None:
            make_local(path, module, style.local, self._group)
        if self._sequence is not None and self._group.size > 1:
            gather_at(
                module, self._sequence, self._group, style.inputs, whole=style.whole, tracker=self._tracker
            )
            for layer in module.modules():  # the layers inside are already split
                if isinstance(layer, PlannedLinear | PlannedEmbedding):
                    layer.takes_whole = True
                if isinstance(layer, AdaptedMixin) and not style.whole:
                    draw_replicated(layer.dropouts(), self._tracker)
        return module

    def tie_again(self, model: nn.Module) -> None:
        """Replace a whole parameter by its shard in other modules that share it with a split layer."""
        for module in model.modules():
            if not isinstance(module, ParallelLayer):
                for name, parameter in module._parameters.items():
                    module._parameters[name] = self._conversion.shard_of(parameter)

    def _linear(self, path: str, layer: nn.Module, style: Column | Row | Vocab) -> nn.Module:
        cls = PlannedLinear
        if not is_transposed(layer) and not computes_linear(layer):
            check_own_forward(layer)
            cls = parallel_class(type(layer), nn.Linear, PlannedLinear)
        ranges = style_ranges(layer, style, self._group.size)
        dim = -1
        gather_output = False
        if isinstance(style, Row):
            dim = 0
        else:
            gather_output = style.gather_output

        def make() -> PlannedLinear:
            return cls.from_plan(
                layer,
                dim,
                gather_output=gather_output,
                group=self._group,
                ranges=ranges,
                sequence=self._sequence_at(path),
            )

        return self._conversion.replace(layer, make)

    def _embedding(self, path: str, layer: nn.Embedding, dim: int | None) -> nn.Module:
        check_own_forward(layer)
        cls = parallel_class(type(layer), nn.Embedding, PlannedEmbedding)

        def make() -> PlannedEmbedding:
            return cls.from_plain(layer, dim, gather_output=False, group=self._group)

        embedding = self._conversion.replace(layer, make)
        embedding.sequence = self._sequence_at(path)  # type: ignore[assignment]  # an attribute of its class
        return embedding

    def _partial(self, path: str, module: nn.Module, style: Sequence | Replicated) -> nn.Module:
        if isinstance(module, nn.Embedding) and isinstance(style, Sequence):
            return self._embedding(path, module, None)
        if isinstance(module, nn.Dropout) and isinstance(style, Replicated):
            return module  # the hooks of its block draw the rank's own numbers
        if isinstance(module, nn.Dropout):
            dropout = ParallelDropout(module.p, module.inplace, tracker=self._tracker)
            own = {k: v for k, v in module.__dict__.items() if k not in ("p", "inplace")}
            dropout.__dict__.update(own)
            return dropout
        if isinstance(style, Sequence):
            part_of = "sequence"
        else:
            part_of = "features"
        mix_in(SequenceMixin, module, sequence_group=self._group, part_of=part_of)
        return module

    def check_ties(self, chosen: dict[int, tuple[str, Style]]) -> None:
        """Raise unless modules that share a weight get the same style; before anything is changed."""
        for module in self._model.modules():
            if id(module) not in chosen or not isinstance(chosen[id(module)][1], Column | Row | Vocab):
                continue
            path, style = chosen[id(module)]
            for other_path, other in self._conversion.partners(module):
                if id(other) in chosen:
                    other_style = chosen[id(other)][1]
                else:
                    other_style = None
                if type(other_style) is not type(style):
                    msg = (
                        f"{path or 'the layer'} shares its weight with {other_path}, which the plan does "
                        f"not split the same; give it {type(style).__name__}() too, or untie them"
                    )
                    raise ModelError(msg)
