"""The application of a plan to a finished model, and a description of its effect."""

import re
from collections.abc import Mapping

from torch import nn
from tp_core.arguments import explain_arguments
from tp_core.errors import ConfigError, ModelError
from tp_core.tensors import check_not_quantized

from tp_shard._groups._group import Group, GroupLike, as_group
from tp_shard._guards import guard_saving
from tp_shard._plans._adapters import (
    is_adapted,
    modules_inside,
    order_adapters,
    tensors_of_layer,
    with_inner_layers,
)
from tp_shard._plans._maker import Maker, check_kind, check_pairs, choose, style_split
from tp_shard._plans._modules import (
    ExpertsMixin,
    ancestors,
    check_parts,
    count_local_groups,
    guard_forward,
)
from tp_shard._plans._styles import Column, Experts, Gathered, Local, Plan, Row, Sequence, Style, Vocab
from tp_shard.nn._convert import is_linear, leave_fast_path, leave_nested_tensors
from tp_shard.nn._draws import BlockDraws, SplitDraws
from tp_shard.nn._planned import PlannedLinear, Regions, SequenceMixin, remember_names
from tp_shard.nn._sequence import SequenceState, SummedGradients

_SMALL = 0.01  # of the weights: below it are norms and biases, which get no line


def describe(model: nn.Module, plan: Plan, notes: Mapping[str, str], ranks: int) -> str:
    """Return the share of a model that a plan splits, and a line for each split or whole module."""
    lines: list[str] = []
    seen: set[int] = set()
    # Over all modules: bytes of the whole and on a rank, elements in all and of split parameters.
    full_nbytes = 0
    local_nbytes = 0
    count = 0
    split_count = 0
    # The elements that stay whole and why, by the names and kinds of modules, without numbers.
    whole_counts: dict[tuple[str, str], int] = {}
    why: dict[tuple[str, str], str] = {}
    inside = modules_inside(model)
    for path, module in model.named_modules():
        if id(module) in inside:
            continue
        style = plan.get(path)
        full = 0
        local = 0
        whole_count = 0
        has_own = False
        # The module by which each parameter is split: a layer with adapters is one with them.
        for split_by, name, parameter in tensors_of_layer(module, style):
            if parameter is None or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            has_own = True
            numel = parameter.numel()
            full += numel * parameter.element_size()
            local += int(numel * _share(split_by, style, name, parameter, ranks)) * parameter.element_size()
            count += numel
            # On one rank nothing is split: what two would split counts.
            if _share(split_by, style, name, parameter, max(2, ranks)) == 1:
                whole_count += numel
            else:
                split_count += numel
        full_nbytes += full
        local_nbytes += local
        if style is not None:
            lines.append(f"{path}: {words(style)}, {full:,} -> {local:,} bytes per rank")
        elif whole_count:
            key = _without_numbers(path), type(module).__name__
            whole_counts[key] = whole_counts.get(key, 0) + whole_count
            why.setdefault(key, _without_last_numbers(_reason(path, module, notes)))
        if path in notes and style is not None:
            lines.append(f"{path}: {notes[path]}")
        elif path in notes and not has_own:
            lines.append(f"{path}: whole, because {notes[path]}")
    big = [key for key, number in whole_counts.items() if number >= _SMALL * count]
    for key in sorted(big, key=lambda key: -whole_counts[key]):
        path, kind = key
        share = f"{kind}, {whole_counts[key] / count:.1%} of the weights"
        lines.append(f"{path or 'the model'}: whole, because {why[key]} ({share})")
    bytes_of = f"{full_nbytes:,} -> {local_nbytes:,} bytes on rank 0 of {ranks}"
    first = f"{split_count / max(1, count):.1%} of the weights are split, all parameters: {bytes_of}"
    return "\n".join([first, *lines])


def _without_numbers(path: str) -> str:
    """Return the name that equal blocks of a list have in common."""
    return re.sub(r"\b\d+\b", "*", path)


def _without_last_numbers(reason: str) -> str:
    """Return a reason without the numbers in the names of modules, but with those of versions and shares."""
    return re.sub(r"(?<!\d)\.\d+\b", ".*", reason)


def reasons(notes: Mapping[str, str], most: int = 5) -> str:
    """Return notes as one text, with one entry for equal blocks."""
    texts: dict[str, None] = {}  # a dict, which keeps their order
    for path, reason in notes.items():
        texts[f"{_without_numbers(path) or 'the model'}: {_without_last_numbers(reason)}"] = None
    shown = list(texts)[:most]
    if len(texts) > most:
        shown.append(f"and {len(texts) - most} more")
    return "; ".join(shown)


def _reason(path: str, module: nn.Module, notes: Mapping[str, str]) -> str:
    if path in notes:
        return notes[path]
    if not is_linear(module) and not isinstance(module, nn.Embedding):
        return "only linear layers, embeddings and experts are split"
    for around in ancestors(path.rpartition(".")[0]):
        if around in notes:
            return f"{around or 'the model'} is: {notes[around]}"
    if is_linear(module):
        return "nothing calls its forward"
    return "it is no table of the vocabulary"


def words(style: Style) -> str:
    """Return a style as a call, without its default values."""
    kind = type(style)
    usual = _usual(style)
    arguments = []
    for name in kind.__slots__:
        value = getattr(style, name)
        if value is not None and value != getattr(usual, name, None):
            arguments.append(f"{name}={value!r}")
    return f"{kind.__name__}({', '.join(arguments)})"


def _usual(style: Style) -> object:
    if isinstance(style, Local):
        return Local(heads=0)
    return type(style)()


def _share(module: nn.Module | None, style: Style | None, name: str, p: nn.Parameter, ranks: int) -> float:
    """Return the share of a parameter on rank 0, which has the largest part; all of it without a module."""
    if module is None:
        return 1.0
    if isinstance(style, Experts):
        is_split = name in (*style.columns, *style.rows)
        if is_split:
            return 1 / ranks
        return 1.0
    if isinstance(style, Local) and name in style.parameters:
        return 1 / ranks
    if not isinstance(style, Column | Row | Vocab) or (isinstance(style, Row) and p.dim() == 1):
        return 1.0
    if isinstance(style, Vocab) and isinstance(module, nn.Embedding):
        return -(-p.size(0) // ranks) / p.size(0)
    split = style_split(module, style, ranks)
    return split.local_size(0) / max(1, split.size)


# -- The application of a plan to a finished model ------------------------------------------------


@explain_arguments("parallelize(model, plan)")
def parallelize(
    model: nn.Module,
    plan: Plan,
    *,
    sequence_dim: int | None = None,
    seed: int = 0,
    group: GroupLike = None,
) -> nn.Module:
    """Split the layers of a finished model as a plan says, in place.

    Layers are split as in Megatron-LM (arXiv:1909.08053), sequences between them as in its sequence
    parallelism (arXiv:2205.05198). The fast path of torch's encoder layers is disabled, because it reads
    weights without calling their layers. Between column and row layers each rank draws its own random
    numbers, for dropout and the like. Elsewhere all ranks draw the same numbers.

    Names are as in ``model.named_modules()``. In a pattern ``*`` stands for one part of a name (or some
    letters in it), ``**`` for any number of parts. The first pattern that fits counts.

    Args:
        model: The model, with the same values on all ranks.
        plan: A style for each layer to split, such as ``{"layers.*.attn.qkv": Column(heads=8, holds="qkv"),
            "layers.*.attn.out": Row(heads=8), "lm_head": Vocab()}``.
        sequence_dim: The sequence dimension, counted from the end, for sequence parallelism: between row and
            column layers each rank has a part of it. -2 by default, if the plan has a :class:`Sequence`.
        seed: A seed for random numbers that differ between ranks; the same on all ranks.
        group: The ranks; the current model-parallel group by default.

    Returns:
        The model; a new module if the model is a single layer that the plan names "".

    Raises:
        ConfigError: A pattern fits no layer, or a layer cannot be split as its style says.
        ModelError: A style does not fit the kind of its layer, layers that share a weight have different
            styles, or the model is wrapped; or a weight is quantized.

    Collectives: none.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8))
        >>> parallelize(model, {"0": Column(), "2": Row()})(torch.ones(1, 8)).shape
        torch.Size([1, 8])
    """
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        msg = f"the model is wrapped in {type(model).__name__}; parallelize the plain one and wrap it then"
        raise ModelError(msg)
    if not isinstance(model, nn.Module):
        msg = (
            "parallelize(model, plan) takes a model first, which is made, and then the plan, got "
            f"{type(model).__name__}: {model!r:.80}"
        )
        raise ModelError(msg)
    if not isinstance(plan, Mapping):
        msg = f"a plan is a dict from names to styles, as {{'*.up_proj': ts.Column()}}, got {plan!r:.80}"
        raise ConfigError(msg)
    if not plan:
        msg = (
            "the plan is empty, and splits nothing; plans.auto(model, batch) makes one from a batch of yours"
        )
        raise ConfigError(msg)
    for pattern, style in plan.items():
        if not isinstance(pattern, str):
            msg = (
                f"a plan has names of layers, as in model.named_modules(), got {pattern!r}; write '{pattern}'"
            )
            raise ConfigError(msg)
        if not isinstance(style, Style):
            styles = "a Column(), Row(), Vocab(), Sequence(), Replicated(), Local(), Gathered() or Experts()"
            msg = f"the plan's {pattern!r} is {styles}, got {style!r}"
            raise ConfigError(msg)
    ranks = as_group(group)
    if ranks.size > 1:
        check_not_quantized(model, "tp_shard")
    named = choose(model, plan)
    chosen = with_inner_layers(named)
    if sequence_dim is None and any(isinstance(s, Sequence | Gathered) for s in plan.values()):
        sequence_dim = -2
    if sequence_dim is not None and (not isinstance(sequence_dim, int) or sequence_dim > -2):
        msg = (
            f"sequence_dim is counted from the end and is not the features: -2 or less, got {sequence_dim!r}"
        )
        raise ConfigError(msg)
    if sequence_dim is None:
        sequence = None
    else:
        sequence = SequenceState(sequence_dim)
    maker = Maker(model, ranks, sequence, seed)
    maker.lists = [path for path, (module, _) in chosen.items() if isinstance(module, nn.ModuleList)]
    maker.wholes = [
        path for path, (_, style) in chosen.items() if isinstance(style, Gathered) and style.whole
    ]
    for path, (module, style) in chosen.items():
        check_kind(path, module, style)
        check_parts(path, module, style, ranks)
    maker.check_ties({id(m): (path, style) for path, (m, style) in chosen.items()})
    check_pairs(model, chosen, ranks)
    # Norms, attentions, experts and adapters are changed in place. They come last, so that an error before
    # leaves the model as it was.
    ordered = sorted(chosen.items(), key=lambda item: _is_in_place(*item[1]))
    replaced = {
        id(module): maker.make(path, module, style)
        for path, (module, style) in ordered
        if not isinstance(style, Gathered)
    }
    styles = {id(module): style for module, style in chosen.values()}
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if child is not None and id(child) in replaced:
                parent._modules[name] = replaced[id(child)]
                leave_fast_path(parent)
                count_local_groups(parent, styles[id(child)], ranks)
        leave_nested_tensors(parent)
    for path, (module, style) in chosen.items():
        if isinstance(style, Gathered):
            maker.make(path, module, style)  # last, because it changes the split layers inside
    split = replaced.get(id(model), model)
    maker.tie_again(split)
    _sum_together(split, ranks)
    remember_names(split)
    if ranks.size > 1:
        order_adapters(split)
        _draw_apart(split, SplitDraws(ranks, seed))
        guard_forward(split, _blocks(named))
        _check_regions(split)
    guard_saving(split)
    return split


def _is_in_place(module: nn.Module, style: Style) -> bool:
    """Return whether a style changes a module, instead of making another one for its place."""
    if isinstance(style, Column | Row | Vocab):
        return is_adapted(module)
    return not (isinstance(style, Sequence) and isinstance(module, nn.Embedding))


def _sum_together(model: nn.Module, group: Group) -> None:
    """Sum the gradients of all parameters that work on parts of a sequence by one all-reduce.

    Forward: nothing. Backward: one all-reduce for each type of parameters.
    """
    summed = SummedGradients(group)
    for module in model.modules():
        if getattr(module, "summed", None) is not None:
            continue  # set by an earlier plan
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


def _check_regions(model: nn.Module) -> None:
    """Check the regions between column and row layers again where other parameters are trained."""
    regions = Regions(model)
    for module in model.modules():
        if (
            isinstance(module, PlannedLinear | SequenceMixin) and module.regions is None
        ):  # not of an earlier plan
            module.regions = regions
    model.register_forward_pre_hook(regions.begin)


def _draw_apart(model: nn.Module, draws: SplitDraws) -> None:
    """Hook the model so that each rank draws its own random numbers between column and row layers."""
    modules = dict(model.named_modules())
    rows = [path for path, m in modules.items() if isinstance(m, PlannedLinear) and m.dim == 0]
    blocks = {}
    for path, module in modules.items():
        if isinstance(module, ExpertsMixin):
            blocks[path] = BlockDraws(draws, module, begins=True)
        if isinstance(module, PlannedLinear) and module.draws is None:
            module.draws = draws
            block = _block_of(path, modules, rows)
            if module.dim != 0 and not module.gather_output and path and block not in blocks:
                blocks[block] = BlockDraws(draws, modules[block], begins=False)
    if "" not in blocks and blocks:
        # For code that calls the layers of a block one by one, and for split features that leave a block and
        # are dropped before their row layer, as in BERT between pooler and classifier.
        BlockDraws(draws, model, begins=False)


def _block_of(path: str, modules: dict[str, nn.Module], rows: list[str]) -> str:
    """Return the name of the module that calls a column layer, and its row layer if there is one."""
    called = [
        name
        for name in ancestors(path.rpartition(".")[0])
        if not isinstance(modules[name], nn.ModuleList | nn.ModuleDict) and not is_adapted(modules[name])
    ]
    for name in called:
        start = f"{name}." if name else ""
        if any(row.startswith(start) for row in rows):
            return name
    return called[0]


def _blocks(chosen: dict[str, tuple[nn.Module, Style]]) -> frozenset[str]:
    """Return the names of the modules around layers with outputs that stay split."""
    return frozenset(
        path.rpartition(".")[0]
        for path, (_, style) in chosen.items()
        if isinstance(style, Column) and not style.gather_output
    )
