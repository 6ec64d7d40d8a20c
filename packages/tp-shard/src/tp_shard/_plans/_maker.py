"""Making what a plan says of each module that it names."""

from torch import nn
from tp_core.errors import ModelError

from tp_shard._groups._group import Group
from tp_shard._groups._random import RandomTracker
from tp_shard._plans._cuts import style_ranges
from tp_shard._plans._hooks import gather_at, split_at
from tp_shard._plans._local import make_experts, make_local
from tp_shard._plans._styles import Column, Experts, Gathered, Local, Replicated, Row, Sequence, Style, Vocab
from tp_shard._shards._layer import ParallelLayer
from tp_shard.nn._convert import Conversion, mix_in
from tp_shard.nn._kinds import computes_linear, is_transposed, parallel_class
from tp_shard.nn._planned import PlannedEmbedding, PlannedLinear, SequenceMixin
from tp_shard.nn._region import ParallelDropout
from tp_shard.nn._sequence import SequenceState

__all__ = ["Maker"]


class Maker:
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
            gather_at(
                module, self._sequence, self._group, style.inputs, whole=style.whole, tracker=self._tracker
            )
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
        return self._conversion.replace(
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
        made = self._conversion.replace(
            layer, lambda: make.from_plain(layer, dim, gather_output=False, group=self._group)
        )
        made.sequence = self._sequence_at(path)  # type: ignore[assignment]  # an attribute of its class
        return made

    def _partial(self, path: str, module: nn.Module, style: Sequence | Replicated) -> nn.Module:
        if isinstance(module, nn.Embedding) and isinstance(style, Sequence):
            return self._embedding(path, module, None)
        if isinstance(module, nn.Dropout) and isinstance(style, Replicated):
            return module  # the block around it knows what is split
        if isinstance(module, nn.Dropout):
            made = ParallelDropout(module.p, module.inplace, tracker=self._tracker)
            made.__dict__.update({k: v for k, v in module.__dict__.items() if k not in ("p", "inplace")})
            return made
        part_of = "sequence" if isinstance(style, Sequence) else "features"
        mix_in(SequenceMixin, module, sequence_group=self._group, part_of=part_of)
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
