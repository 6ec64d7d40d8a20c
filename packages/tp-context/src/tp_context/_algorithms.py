"""The context-parallel attention algorithms: which can do an attention, and which costs least.

All save only this rank's slices for the backward pass. The second backward pass always uses all-gathers.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from tp_core.errors import StepError
from tp_core.output import get_logger

from tp_context._all_gather import AllGatherAttention
from tp_context._attention_inputs import Inputs, QueryKeyCuts, Rules
from tp_context._dropout_mask import DropoutMask
from tp_context._ring import RingAttention
from tp_context._slices import Cut
from tp_context._ulysses import ulysses

_log = get_logger("tp_context")


def attend(inputs: Inputs, rules: Rules, algorithm: str) -> Tensor:
    """Return the attention of this rank's queries to the keys of whole sequences: as `Inputs.query`.

    Raises:
        StepError: The algorithm cannot do it.

    Collectives: those of the algorithm, in forward and in backward.
    """
    device = inputs.query.device
    shape = inputs.query.shape
    if torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
        cast = [t.to(dtype) if t is not None and _is_cast(t) else t for t in inputs[:5]]
        inputs = Inputs(*cast, inputs.sinks)  # type: ignore[arg-type,call-arg]  # the same are None
    inputs = _with_batch(inputs)
    cuts = None
    if rules.rows is not None and rules.keys is not None:
        cuts = QueryKeyCuts(rules.rows, rules.keys)
    if cuts is None:
        algorithm = "all-gather"  # each rank has all queries
    elif algorithm == "auto":
        algorithm = _choose(inputs, rules, cuts.keys)
    problem = ""
    if cuts is not None:
        problem = refusal(algorithm, inputs, rules, cuts.keys.size)
    if problem:
        msg = (
            f"attention={algorithm!r} of backend 'context' cannot do this attention: {problem}; choose "
            "'all-gather'"
        )
        raise StepError(msg)
    with torch.autocast(device.type, enabled=False):
        if cuts is not None and algorithm == "ulysses":
            mixed = ulysses(inputs, rules, cuts)
        elif cuts is not None and algorithm == "ring":
            mixed = RingAttention.apply(rules, cuts, *inputs)  # type: ignore[no-untyped-call]  # torch's
        else:
            if rules.dropout:
                noise = DropoutMask(inputs, rules)
            else:
                noise = None
            mixed = AllGatherAttention.apply(rules, noise, *inputs)  # type: ignore[no-untyped-call]  # torch's
    return mixed.reshape(*shape[:-1], mixed.size(-1))


def _is_cast(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dtype is not torch.float64


def _with_batch(inputs: Inputs) -> Inputs:
    """Return inputs of (batch, heads, tokens, features); masks may have fewer dimensions, which come last."""
    query, key, value, mask, bias, sinks = inputs
    lead = query.shape[:-3]
    if query.dim() < 3:
        query, key, value = (t.unsqueeze(-3) for t in (query, key, value))
    if len(lead) > 1:
        mask = _flat_batch(mask, lead)
        bias = _flat_batch(bias, lead)
    query, key, value = (
        t.expand(*lead, *t.shape[-3:]).reshape(-1, *t.shape[-3:]) for t in (query, key, value)
    )
    return Inputs(query, key, value, mask, bias, sinks)


def _flat_batch(table: Tensor | None, lead: torch.Size) -> Tensor | None:
    """Return a mask or bias with one dimension for several of the batch, if it has them."""
    if table is None or table.dim() < 4:
        return table
    return table.expand(*lead, *table.shape[-3:]).flatten(0, -4)


def refusal(algorithm: str, inputs: Inputs, rules: Rules, ranks: int) -> str:
    """Return why an algorithm cannot do an attention; nothing if it can."""
    query, _, _, mask, bias, sinks = inputs
    if algorithm == "ulysses" and query.size(1) < ranks:
        return f"it splits the heads, and there are {query.size(1)} for {ranks} ranks"
    if algorithm == "ring":
        if rules.dropout:
            return "dropout of attention weights is not in it"
        if bias is not None or sinks is not None or rules.softcap is not None:
            return "biases by position, sinks and soft caps of scores are not in it"
        if mask is not None and mask.dtype is not torch.bool:
            return "it takes boolean masks, and this one is additive"
    return ""


class _Rates(NamedTuple):
    """What a machine of a kind does in a second, roughly: algorithms are compared, and not timed.

    Measured rates would choose differently in two runs, and their last digits would then differ.
    """

    operations: float
    nbytes: float
    latency_s: float


_CPU_RATES = _Rates(3e10, 1.5e9, 6e-4)
_ACCELERATOR_RATES = _Rates(3e14, 1e11, 3e-5)


class Size(NamedTuple):
    """The size of an attention: heads are the queries', and ``itemsize`` the bytes of a number."""

    samples: int
    heads: int
    key_heads: int
    features: int
    tokens: int
    ranks: int
    itemsize: int = 4


def costs(size: Size, *, seen: float = 0.5, device: str = "cpu") -> dict[str, float]:
    """Return what forward and backward cost by each algorithm: to be compared, and no forecast of time.

    Args:
        size: The size of the attention.
        seen: The part of all pairs of a query and a key that are computed: half of them under a causal mask.
        device: The type of the device.
    """
    rates = _CPU_RATES if device == "cpu" else _ACCELERATOR_RATES
    pairs = size.samples * size.heads * size.tokens**2 * seen / size.ranks
    # Two products of as many multiplications and additions in forward, 2.5 times as much in backward.
    work = 3.5 * 4 * pairs * size.features / rates.operations
    others = (size.ranks - 1) / size.ranks
    token = size.samples * size.features * size.itemsize * size.tokens * others / rates.nbytes
    both = 2 * size.key_heads * token  # the keys and values of all other ranks
    # They are gathered in forward and in backward, and their gradients change places once.
    gathered = 3 * both + 3 * rates.latency_s
    key_heads = size.key_heads
    if key_heads % size.ranks:
        key_heads = size.heads  # which are repeated, as a group may lie on two ranks
    changed = 2 * (2 * size.heads + 2 * key_heads) * token / size.ranks + 4 * rates.latency_s
    padded = -(-size.heads // size.ranks) * size.ranks / size.heads
    # Twice around with all but the last step, and gradients with all steps.
    passed = (2 + 1 / others) * both + (3 * size.ranks - 2) * rates.latency_s
    return {"all-gather": work + gathered, "ulysses": work * padded + changed, "ring": work + passed}


_chosen: set[tuple[str, Size]] = set()
"""What is in the log already."""


def _choose(inputs: Inputs, rules: Rules, keys: Cut) -> str:
    """Return the cheapest algorithm that can do an attention, the same on all ranks."""
    query, key = inputs.query, inputs.key
    size = Size(
        query.size(0),
        query.size(1),
        key.size(1),
        query.size(-1),
        keys.length,
        keys.size,
        query.element_size(),
    )
    seen = 0.5 if rules.is_causal else 1.0
    able = {
        algorithm: cost
        for algorithm, cost in costs(size, seen=seen, device=query.device.type).items()
        if not refusal(algorithm, inputs, rules, keys.size)
    }
    cheapest = min(able, key=able.__getitem__)
    if (cheapest, size) not in _chosen and keys.before is None:
        _chosen.add((cheapest, size))
        _log.info("attention over %d tokens on %d ranks by %s", size.tokens, size.ranks, cheapest)
    return cheapest
