"""The layouts of split tensors, and what a rank of one needs, for a model that is still plain.

A plan is found and proven by running the model, which takes its weights. This forecast has none, and goes by
the form that proven plans of transformers have: linear layers of the blocks are split in pairs, tables of the
vocabulary and heads over it by its entries. Inside a pair activations are split, residuals between pairs are
whole, and each pair sums its outputs over the ranks.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from torch import Tensor, nn
from tp_core.internal import (
    averaged_gradients,
    compute_once,
    divisors,
    repeated_blocks,
    sharded_memory,
    sharded_transfers,
)
from tp_core.jobs import Footprint, Forecast, Layout, StepWork, Transfer, replicated_memory
from tp_core.plugins import Job
from tp_core.sessions import FullyShardOptions

from tp_shard.nn._convert import is_linear

_LEAST_WORDS = 1000
"""The least entries of a table that is a vocabulary."""


@dataclass(frozen=True, slots=True)
class _Split:
    """The part of the trained weights that is split, and the bytes that the blocks keep inside pairs."""

    part: float
    inside: int
    pairs: int
    passed: int
    words: int


@dataclass(frozen=True, slots=True)
class _Linears:
    """The linear layers of a model.

    Attributes:
        part: The part of all weights that is split.
        of_blocks: The names of modules with linear layers in them, and how many, by block.
        table: The outputs of the head over a vocabulary; 0 if there is none.
        width: The inputs of that head.
    """

    part: float
    of_blocks: dict[str, list[tuple[str, int]]]
    table: int
    width: int


def list_layouts(model: nn.Module, size: int) -> Iterator[Layout]:
    """Yield the layouts on ``size`` ranks: how many split a tensor, and how their copies go together."""
    repeated_blocks(model)  # which refuses a model without any
    heads = _heads(model)
    for tensor in divisors(size):
        if heads % tensor:
            continue
        copies = size // tensor
        group = {"group_size": tensor}
        setup = (
            f"ts.distributed.init_process_group({tensor})\n"
            "model = ts.parallelize(model, ts.plans.auto(model, batch))"
        )
        yield Layout(
            axes={"data": copies, "tensor": tensor}, options={"shard": {**group, "data": "ddp"}}, setup=setup
        )
        for shards in divisors(copies):
            for again in (True, False):
                data = FullyShardOptions(
                    replicas=copies // shards,
                    reshard_after_forward=again,
                    activation_checkpointing=False,
                    offload=False,
                )
                yield Layout(
                    axes={"data": copies // shards, "fsdp": shards, "tensor": tensor},
                    options={"shard": {**group, "data": data}},
                    setup=setup,
                )


def forecast(job: Job, layout: Layout, options: FullyShardOptions | None) -> Forecast | None:
    """Return the memory of a rank with its shards, and the sums of each pair of layers."""
    footprint, model = job.footprint, job.model
    if footprint is None or model is None or footprint.activations is None:
        return None
    tensor = layout.axes["tensor"]
    readers = layout.ranks // tensor
    split = _split(model, footprint)
    part = split.part / tensor + 1 - split.part
    own = _own(footprint, part, split.inside - split.inside // tensor)
    if options is None:
        need = replicated_memory(job, own, keeps_gradients=readers > 1 or job.accumulate > 1)
        transfers = averaged_gradients(need.gradients, readers, stride=tensor)
    else:
        ranks = readers // options.replicas
        found = sharded_memory(replace(job, footprint=own), options, ranks=ranks)
        if found is None:
            return None
        # It is of units of the whole model; a rank gathers those of its shards.
        need = replace(found, communication=int(found.communication * part))
        transfers = sharded_transfers(job, options, ranks=ranks, stride=tensor, part=part)
    sums = Transfer(kind="all-reduce", nbytes=split.passed, ranks=tensor, times=2 * split.pairs + 2)
    if split.words:
        logits = Transfer(kind="all-gather", nbytes=split.words, ranks=tensor)
        transfers = (*transfers, logits)
    work = StepWork(operations=part, is_sharded=options is not None, transfers=(*transfers, sums))
    return Forecast(memory=need, work=work)


def _own(footprint: Footprint, part: float, saved: int) -> Footprint:
    """Return the footprint of a rank: a part of the states, and activations without ``saved`` bytes."""
    before = max(1, sum(footprint.kept.values()))
    activations = max(0, (footprint.activations or 0) - saved)
    gradients = int(footprint.gradients * part)
    return replace(
        footprint,
        weights=int(footprint.weights * part),
        gradients=gradients,
        optimizer=None if footprint.optimizer is None else int(footprint.optimizer * part),
        update=int(footprint.update * part),
        activations=activations,
        alone=max(0, footprint.alone - saved),
        # Of a large vocabulary the peak comes at the loss, when there are no gradients yet.
        with_gradients=max(
            gradients, activations, footprint.with_gradients - footprint.gradients - saved + gradients
        ),
        casts=int(footprint.casts * part),
        kept={name: int(n * (1 - saved / before)) for name, n in footprint.kept.items()},
        timeline={
            # What is saved is there as long as the blocks' activations are.
            name: [int(n * max(0.0, 1 - saved / max(1, footprint.alone))) for n in both]
            for name, both in footprint.timeline.items()
        },
    )


def _split(model: nn.Module, footprint: Footprint) -> _Split:
    linears = compute_once((model, "linears"), lambda: _find_linears(model))
    passed = footprint.passed.get(next(iter(linears.of_blocks)), 0)
    inside = pairs = 0
    for modules in linears.of_blocks.values():
        within, count = _inside(modules, footprint, passed)
        inside, pairs = inside + within, pairs + max(1, count)
    return _Split(linears.part, inside, pairs, passed, passed * linears.table // linears.width)


def _find_linears(model: nn.Module) -> _Linears:
    split: dict[int, int] = {}
    of_blocks: dict[str, list[tuple[str, int]]] = {}
    for name, block in repeated_blocks(model).items():
        weights = [_weight(m) for m in block.modules() if is_linear(m)]
        split |= {id(w): w.numel() for w in weights}
        counts = [(p, sum(map(is_linear, m.children()))) for p, m in block.named_modules() if p]
        of_blocks[name] = [(f"{name}.{path}", count) for path, count in counts if count]
    largest = max((m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)), default=0)
    table, width = 0, 1
    for module in model.modules():
        if isinstance(module, nn.Embedding) and module.num_embeddings >= _LEAST_WORDS:
            split[id(module.weight)] = module.weight.numel()
        elif is_linear(module) and _LEAST_WORDS <= largest == max(_weight(module).shape):
            weight = _weight(module)
            split[id(weight)] = weight.numel()
            table, width = largest, max(1, min(weight.shape))
    total = sum(p.numel() for p in model.parameters())
    return _Linears(sum(split.values()) / max(1, total), of_blocks, table, width)


def _weight(layer: nn.Module) -> Tensor:
    weight = layer.weight
    assert isinstance(weight, Tensor)  # noqa: S101 - of a linear layer, as `is_linear` says
    return weight


def _inside(modules: list[tuple[str, int]], footprint: Footprint, passed: int) -> tuple[int, int]:
    """Return the bytes that a block keeps between the layers of pairs, and the number of pairs."""
    nbytes = pairs = 0
    for name, layers in modules:
        kept, out = footprint.kept.get(name, 0), footprint.passed.get(name, 0)
        if layers > 1 and out == passed:  # from the first layer of a pair to the last
            nbytes, pairs = nbytes + max(0, kept - out), pairs + 1
        elif layers == 1 and out > passed:  # the first layers of a pair alone
            nbytes, pairs = nbytes + kept, pairs + 1
    return nbytes, pairs


def _heads(model: nn.Module) -> int:
    """Return the number of key heads that a model of transformers names, over which attention is split."""
    config: object = getattr(model, "config", None)
    heads = getattr(config, "num_attention_heads", None)
    keys = getattr(config, "num_key_value_heads", None)
    found: Mapping[str, object] = {"keys": keys, "heads": heads}
    return next((n for n in found.values() if isinstance(n, int) and n > 0), 0)
