"""The layouts of split tensors, and the memory of a rank of one, for a model that is still plain.

A plan is found and proven by running the model, which takes its weights. This estimate has none, and goes by
the form that proven plans of transformers have: linear layers of the blocks are split in pairs, tables of the
vocabulary and heads over it by its entries. Inside a pair activations are split, and residuals between pairs
are whole.
"""

from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor, nn
from tp_core.fully_sharded import FullyShardOptions, sharded_memory
from tp_core.jobs import Footprint, Layout, MemoryNeed, divisors, replicated_memory
from tp_core.modules import repeated_blocks
from tp_core.plugins import Job

from tp_shard.nn._convert import is_linear

_LEAST_WORDS = 1000
"""The least entries of a table that is a vocabulary."""


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
            for again in (False, True):
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


def plain_memory(
    job: Job, footprint: Footprint, model: nn.Module, ranks: int, options: FullyShardOptions | None
) -> MemoryNeed | None:
    """Return the memory of a rank where ``ranks`` of them split the tensors of a plain model.

    Args:
        job: The job.
        footprint: The memory of a device with the whole model, for the batch of such a group.
        model: The plain model.
        ranks: The number of ranks of a group.
        options: How shards are sharded over the groups; ``None`` if they are not.
    """
    copies = job.environment.world_size // ranks
    share = _split_share(model)
    part = share / ranks + 1 - share
    inside = _nbytes_inside(model, footprint)
    own = _own(footprint, part, inside - inside // ranks)
    keeps_gradients = copies > 1 or job.accumulate > 1
    if options is None:
        need = replicated_memory(job, own, keeps_gradients=keeps_gradients)
    else:
        of_shards = sharded_memory(replace(job, footprint=own), options, ranks=copies // options.replicas)
        if of_shards is None:
            return None
        # It is of units of the whole model; a rank gathers those of its shards.
        need = replace(of_shards, communication=int(of_shards.communication * part))
    if not need.fits:
        return need
    # The trace is of whole tensors, which need not fit: as much of the segments is left unused as there.
    alone = replace(job, free_nbytes=None)
    return need.with_reserved_as(replicated_memory(alone, footprint, keeps_gradients=keeps_gradients))


def _own(footprint: Footprint, part: float, saved: int) -> Footprint:
    """Return the footprint of a rank: a part of the states, and activations without ``saved`` bytes."""
    before = max(1, sum(footprint.kept.values()))
    if footprint.activations is None:
        activations = None
    else:
        activations = max(0, footprint.activations - saved)
    gradients = int(footprint.gradients * part)
    if footprint.optimizer is None:
        optimizer = None
    else:
        optimizer = int(footprint.optimizer * part)
    return replace(
        footprint,
        weights=int(footprint.weights * part),
        gradients=gradients,
        optimizer=optimizer,
        update=int(footprint.update * part),
        activations=activations,
        alone=max(0, footprint.alone - saved),
        # Of a large vocabulary the peak comes at the loss, when there are no gradients yet.
        with_gradients=max(
            gradients, activations or 0, footprint.with_gradients - footprint.gradients - saved + gradients
        ),
        casts=int(footprint.casts * part),
        trace=(),
        kept={name: int(n * (1 - saved / before)) for name, n in footprint.kept.items()},
        timeline={
            # What is saved is there as long as the blocks' activations are.
            name: [int(n * max(0.0, 1 - saved / max(1, footprint.alone))) for n in levels]
            for name, levels in footprint.timeline.items()
        },
    )


def _split_share(model: nn.Module) -> float:
    """Return the part of all weights that is split."""
    split: dict[int, int] = {}
    for block in repeated_blocks(model).values():
        weights = [_weight(module) for module in block.modules() if is_linear(module)]
        split |= {id(weight): weight.numel() for weight in weights}
    largest = max((m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)), default=0)
    for module in model.modules():
        if isinstance(module, nn.Embedding) and module.num_embeddings >= _LEAST_WORDS:
            split[id(module.weight)] = module.weight.numel()
        elif is_linear(module) and _LEAST_WORDS <= largest == max(_weight(module).shape):
            weight = _weight(module)
            split[id(weight)] = weight.numel()
    total = sum(p.numel() for p in model.parameters())
    return sum(split.values()) / max(1, total)


def _weight(layer: nn.Module) -> Tensor:
    weight = layer.weight
    assert isinstance(weight, Tensor)  # noqa: S101 - of a linear layer, as `is_linear` says
    return weight


def _nbytes_inside(model: nn.Module, footprint: Footprint) -> int:
    """Return the bytes that the blocks keep between the layers of pairs."""
    blocks = repeated_blocks(model)
    passed = footprint.passed.get(next(iter(blocks)), 0)
    nbytes = 0
    for name, block in blocks.items():
        for path, module in block.named_modules():
            layers = sum(map(is_linear, module.children()))
            if not path or not layers:
                continue
            kept = footprint.kept.get(f"{name}.{path}", 0)
            out = footprint.passed.get(f"{name}.{path}", 0)
            if layers > 1 and out == passed:  # from the first layer of a pair to the last
                nbytes += max(0, kept - out)
            elif layers == 1 and out > passed:  # the first layers of a pair alone
                nbytes += kept
    return nbytes


def _heads(model: nn.Module) -> int:
    """Return the number of key heads that a model of transformers names, over which attention is split."""
    config: object = getattr(model, "config", None)
    heads = getattr(config, "num_attention_heads", None)
    keys = getattr(config, "num_key_value_heads", None)
    for count in (keys, heads):
        if isinstance(count, int) and count > 0:
            return count
    return 0
