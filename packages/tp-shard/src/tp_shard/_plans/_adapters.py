"""Linear layers with adapters of Hugging Face's peft: a plan splits such a layer and its adapters as one.

Adapters are known by their structure, so that peft need not be installed:

    =================================  ===================  ==================
    tensor                             of a column layer    of a row layer
    =================================  ===================  ==================
    ``base_layer``                     its outputs          its inputs
    ``lora_A.NAME`` (rank, in)         whole                its inputs
    ``lora_B.NAME`` (out, rank)        its outputs          whole
    ``lora_magnitude_vector.NAME``     its outputs          whole
    ``ia3_l.NAME``, scaling outputs    its outputs          whole
    ``ia3_l.NAME``, scaling inputs     whole                its inputs
    =================================  ===================  ==================

The ``forward`` of peft then computes with shards what it computes with the whole. The classes below add what
it does not know of: dropout of a whole input, norms of weights with split inputs, joined outputs, parts of a
sequence. There the outputs of A are gathered before the B of a column layer, which are narrower than inputs.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from tp_core.errors import ModelError
from tp_core.modules import Mixin, mix_in

from tp_shard._groups._collectives import all_reduce_, copy, gather
from tp_shard._groups._group import Group
from tp_shard._plans._modules import PartialMixin, hold
from tp_shard._plans._styles import Column, Row, Style, Vocab
from tp_shard._shards import ParallelLayer
from tp_shard._split import Split
from tp_shard.nn._convert import base_of
from tp_shard.nn._draws import mark
from tp_shard.nn._heads import sum_shared
from tp_shard.nn._planned import PlannedLinear, SequenceMixin
from tp_shard.nn.functional import mark_output

Entry = TypeVar("Entry")

_KNOWN = frozenset({"base_layer", "lora_dropout", "lora_A", "lora_B", "lora_magnitude_vector", "ia3_l"})


def is_adapted(module: nn.Module) -> bool:
    return base_of(module) is not module


def modules_inside(model: nn.Module) -> set[int]:
    """Return the ids of the modules of which adapted layers consist."""
    inside: set[int] = set()
    for layer in model.modules():
        if is_adapted(layer):
            inside.update(id(module) for module in layer.modules() if module is not layer)
    return inside


def inside_peft(model: nn.Module) -> tuple[str, nn.Module]:
    """Return the model inside a ``PeftModel``, after its name there; "" and the model for any other."""
    inner = model
    if hasattr(model, "peft_config") and callable(getattr(model, "get_base_model", None)):
        inner = model.get_base_model()  # type: ignore[operator]  # it is callable, as seen
    name = next((name for name, module in model.named_modules() if module is inner), "")
    return name, inner


def with_copies(model: nn.Module, entries: Mapping[str, Entry]) -> dict[str, Entry]:
    """Return entries of a plan, the same ones for each copy of a module in peft's ``modules_to_save``.

    One copy is trained. The others, and the original, are called after a switch of adapters.
    """
    result = dict(entries)
    for path, module in model.named_modules():
        copies = module._modules.get("modules_to_save")
        if copies is None or "original_module" not in module._modules:
            continue
        starts = [f"{path}.original_module", *(f"{path}.modules_to_save.{name}" for name in copies._modules)]
        for start in starts:
            inside = {n: e for n, e in entries.items() if n == start or n.startswith(f"{start}.")}
            for other in starts:
                result.update({other + name[len(start) :]: entry for name, entry in inside.items()})
    return result


def with_inner_layers(chosen: Mapping[str, tuple[nn.Module, Style]]) -> dict[str, tuple[nn.Module, Style]]:
    """Return the modules that a plan names, with the linear layers inside adapted ones that are split too."""
    adapted = {path: layer for path, (layer, style) in chosen.items() if _is_split(layer, style)}
    inside = {id(m) for layer in adapted.values() for m in layer.modules() if m is not layer}
    result = {path: entry for path, entry in chosen.items() if id(entry[0]) not in inside}
    for path, layer in adapted.items():
        style = inner = chosen[path][1]
        if isinstance(style, Column | Vocab):  # the outputs are joined once, and not those of each layer
            inner = replace(style, gather_output=False)
        for name, module in layer.named_modules():
            if any(module is part for part in _split_linears(layer, style)):
                inner_path = f"{path}.{name}" if path else name
                result[inner_path] = module, inner
    return result


def tensors_of_layer(
    layer: nn.Module, style: Style | None
) -> Iterator[tuple[nn.Module | None, str, nn.Parameter | None]]:
    """Yield the parameters of a module, those of its adapters too.

    Each comes with the layer by which it is split, ``None`` for one that stays whole, and with its name.
    """
    if not is_adapted(layer):
        yield from ((layer, name, p) for name, p in layer._parameters.items())
        return
    linears: list[nn.Module] = []
    vectors: list[tuple[nn.Module, str, int]] = []
    if _is_split(layer, style):
        linears = _split_linears(layer, style)
        vectors = list(_split_vectors(layer, style))
    for module in layer.modules():
        is_split_linear = any(module is linear for linear in linears)
        for name, p in module._parameters.items():
            is_split_vector = any(module is owner and name == vector for owner, vector, _ in vectors)
            split_by = None
            if is_split_linear or is_split_vector:
                split_by = base_of(layer)
            yield split_by, name, p


def _is_split(layer: nn.Module, style: Style | None) -> bool:
    return is_adapted(layer) and isinstance(style, Column | Row | Vocab)


def _split_linears(layer: nn.Module, style: Style | None) -> list[nn.Module]:
    """Return the linear layers inside an adapted layer that are split as it is."""
    matrix = "lora_A" if isinstance(style, Row) else "lora_B"
    return [base_of(layer), *_children(layer, matrix).values()]


def _split_vectors(layer: Any, style: Style | None) -> Iterator[tuple[nn.Module, str, int]]:
    """Yield the vectors inside an adapted layer that are split: their modules, names and split dimensions."""
    is_row = isinstance(style, Row)
    if not is_row:
        yield from ((inner, "weight", 0) for inner in _children(layer, "lora_magnitude_vector").values())
    vectors = layer._modules.get("ia3_l")
    if vectors is not None and layer.is_feedforward == is_row:
        yield from ((vectors, name, int(is_row)) for name in vectors._parameters)


def refusal_of_adapters(layer: Any) -> str | None:
    """Return the reason why an adapted layer cannot be split, ``None`` if it can."""
    magnitudes = _children(layer, "lora_magnitude_vector")
    for name, variant in getattr(layer, "lora_variant", {}).items():
        if name not in magnitudes:
            return f"its adapter {name} computes more than LoRA, DoRA or IA3 ({type(variant).__name__})"
    foreign = [
        n for n, m in layer._modules.items() if n not in _KNOWN and m is not None and any(m.parameters())
    ]
    if foreign or any(p is not None for p in layer._parameters.values()):
        return f"its adapters have parameters beside those of LoRA, DoRA and IA3: {', '.join(foreign)}"
    matrices = [*_children(layer, "lora_A").values(), *_children(layer, "lora_B").values()]
    other = next((type(m).__name__ for m in matrices if not isinstance(m, nn.Linear)), None)
    if other is not None:
        return f"its adapter has a {other} where LoRA has a linear layer"
    if magnitudes and layer.merged_adapters:
        return "its DoRA adapter is merged into its weight; call unmerge_adapter() before the model is split"
    return None


def _children(layer: nn.Module, name: str) -> dict[str, nn.Module]:
    inner = layer._modules.get(name)
    if inner is None:
        return {}
    return {n: m for n, m in inner._modules.items() if m is not None}


# -- The layer in a split model -------------------------------------------------------------------


def split_adapters(
    layer: nn.Module, style: Column | Row | Vocab, split: Split, group: Group, *, has_parts: bool
) -> nn.Module:
    """Split the vectors of an adapted layer, in place; the linear layers inside are replaced elsewhere."""
    if group.size == 1:
        return layer
    cuts: dict[nn.Module, dict[str, Split]] = {}
    for owner, name, dim in _split_vectors(layer, style):
        cuts.setdefault(owner, {})[name] = replace(split, dim=dim)
    for inner in _children(layer, "lora_magnitude_vector").values():
        hold(inner, MagnitudeMixin, cuts.pop(inner, {}), group, is_row=isinstance(style, Row))
    for owner, splits in cuts.items():
        hold(owner, PartialMixin, splits, group)
    if has_parts:
        if isinstance(style, Row):
            whole_matrix = "lora_B"
        else:
            whole_matrix = "lora_A"
        for inner in _children(layer, whole_matrix).values():
            mix_in(SequenceMixin, inner, sequence_group=group)
    joins = not isinstance(style, Row) and style.gather_output
    mix_in(AdaptedMixin, layer, group=group, joins_output=joins)
    return layer


class OrderedMixin(Mixin):
    """A module of peft that calls adapters one after another for the rows of a batch that are theirs.

    Collectives: those of the module, once for each adapter.
    """

    def _mixed_batch_forward(self, x: Tensor, *args: Any, adapter_names: list[str], **kwargs: Any) -> Tensor:
        # peft calls them in the order of a set of names, which differs between processes.
        outputs = []
        rows = []
        for name in sorted(set(adapter_names)):
            own = [row for row, other in enumerate(adapter_names) if other == name]
            names = [name] * len(own)
            outputs.append(super()._mixed_batch_forward(x[own], *args, adapter_names=names, **kwargs))  # type: ignore[misc]  # mixed into a module
            rows += own
        return torch.cat(outputs)[torch.tensor(rows, device=x.device).argsort()]


def order_adapters(model: nn.Module) -> None:
    """Make modules of peft around split layers call the adapters of a mixed batch in one order, in place."""
    for module in list(model.modules()):
        is_mixed = hasattr(module, "_mixed_batch_forward") and not isinstance(module, OrderedMixin)
        if is_mixed and any(isinstance(m, ParallelLayer) for m in module.modules()):
            mix_in(OrderedMixin, module)


class AdaptedMixin(OrderedMixin):
    """A linear layer with adapters, split as one.

    Collectives: those of the linear layers inside. With joined outputs one all-gather forward, instead of one
    for each of them.
    """

    base_layer: PlannedLinear
    group: Group
    joins_output: bool

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        base = self.base_layer
        draws = base.draws
        is_watched = draws is not None and draws.is_watching
        if is_watched:
            # The base of a column layer has begun the rank's own random numbers before the dropout of the
            # adapter, with a whole input. Of a sequence it is a part, or the block has gathered it.
            mark(x, is_split=base.sequence is not None or x.size(-1) != base.in_features)
        was_inside = draws is None or draws.is_inside
        vectors = self._modules.get("ia3_l")  # type: ignore[attr-defined]  # mixed into a module
        with summed_gradients(vectors, base):
            output = super().forward(x, *args, **kwargs)  # type: ignore[misc]  # as above
        if self.joins_output:
            output = gather(output, -1, size=base.out_features, group=self.group)
            if draws is not None and not was_inside:
                draws.end()
        is_split = base.dim != 0 and not self.joins_output
        if is_watched:
            # What is computed from a shard is marked as split, such as the norms of DoRA in a row layer.
            mark(output, is_split=is_split)
        if is_split:
            return mark_output(output, base.out_features)
        return output

    def dropouts(self) -> Iterable[nn.Module]:
        """Return the modules that drop elements of the adapters' inputs, if these are whole features."""
        if self.base_layer.dim == 0:
            return ()
        return _children(self, "lora_dropout").values()  # type: ignore[arg-type]  # mixed into a module

    def update_layer(self, *args: Any, **kwargs: Any) -> None:  # noqa: ARG002 - the signature of peft
        msg = (
            "an adapter is added to a layer that is split already, and would be whole; add all adapters "
            "(add_adapter(), load_adapter()) before parallelize()"
        )
        raise ModelError(msg)


class MagnitudeMixin(PartialMixin):
    """DoRA's magnitudes of a split weight.

    Collectives: for split inputs one all-reduce of a number for each output; in training with dropout the one
    of the base's product, which DoRA computes again.
    """

    is_row: bool

    def forward(self, x: Tensor, *, base_layer: Any, base_result: Any = None, **options: Any) -> Any:
        if base_result is None:  # with dropout; the product of peft would leave out the sums over ranks
            base_result = base_layer._product(x)
        with summed_gradients(self, base_layer), summed_gradients(base_layer, base_layer):
            return super().forward(x, base_layer=base_layer, base_result=base_result, **options)

    def get_lora_weight(self, lora_A: Any, lora_B: Any, **_named: Any) -> Tensor:  # noqa: N803 - names of peft
        product: Tensor = lora_B.weight @ lora_A.weight
        return product

    def get_weight_norm(self, weight: Tensor, lora_weight: Tensor, scaling: float, **_named: Any) -> Tensor:
        # Without the adapter's name, for which peft may return a norm from before the split.
        norm: Tensor = super().get_weight_norm(weight, lora_weight, scaling)  # type: ignore[misc]  # mixed into a module
        if not self.is_row:
            return norm
        wide = norm.detach().to(torch.promote_types(norm.dtype, torch.float32))
        return all_reduce_(wide.square(), self.group, layer=self).sqrt().to(norm.dtype)


@contextmanager
def summed_gradients(module: nn.Module | None, base: PlannedLinear) -> Iterator[None]:
    """Sum the gradients that ranks have of a module's parameters: of heads or positions of their own.

    Forward: nothing. Backward: an all-reduce for each parameter of shared heads, or on parts of a sequence.
    """
    if isinstance(module, ParallelLayer):
        splits = module.splits
    else:
        splits = {}
    has_parts = base.sequence is not None
    if module is None or not (splits or has_parts):
        yield
        return
    own = module.__dict__["_parameters"]
    passed = {n: sum_shared(p, splits[n], base.group) for n, p in own.items() if n in splits}
    if has_parts:
        whole = {n: p for n, p in own.items() if n not in splits and p is not None}
        passed |= {n: copy(p, group=base.group) for n, p in whole.items()}
    # Replaced for one call, as in `SequenceMixin`: the optimizer and the state must not see the results.
    module.__dict__["_parameters"] = {**own, **passed}
    try:
        yield
    finally:
        module.__dict__["_parameters"] = own
