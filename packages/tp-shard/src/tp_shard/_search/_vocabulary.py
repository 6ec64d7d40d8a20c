"""Tables and heads of a vocabulary: which of a model can be split by classes."""

import re
from collections.abc import Collection

from torch import nn
from tp_core.errors import ModelError

from tp_shard._groups._group import ALONE
from tp_shard._plans._styles import Plan, Style, Vocab
from tp_shard.nn._convert import Conversion
from tp_shard.nn._kinds import computes_linear, is_transposed, parallel_class, why_not_split
from tp_shard.nn._planned import PlannedEmbedding, PlannedLinear

__all__ = ["refusal", "vocabulary"]

_FEW_CLASSES = 1024
_HEAD = re.compile(r"(lm_head|head|embed_out|output|classifier|unembed)$")


def vocabulary(
    model: nn.Module,
    plan: Plan,
    notes: dict[str, str],
    *,
    parallel_loss: bool,
    last: Collection[str] | None = None,
    called: Collection[str] | None = None,
) -> dict[str, Style]:
    """Split the head, and the embeddings as tall as it or tied to it; else the tallest embedding.

    A head of few classes stays whole: joining its logits would cost more than it saves.

    Args:
        model: The model.
        plan: What is split already.
        notes: Gets why a table or a head stays whole, by its name.
        parallel_loss: Whether logits stay split.
        last: The layers whose outputs the model returns, if that is known; else their names decide.
        called: The layers that are called, if that is known. The weight of another table may be read as it
            is, as queries are in detectors.
    """
    modules = dict(model.named_modules())
    conversion = Conversion(model, ALONE)
    tables = {
        path: m
        for path, m in modules.items()
        if isinstance(m, nn.Embedding)
        and (called is None or path in called or any(p in called for p, _ in conversion.partners(m)))
    }
    heights = {m.num_embeddings for m in tables.values()}
    heads = {
        path: m
        for path, m in modules.items()
        if isinstance(m, nn.Linear)
        and path not in plan
        and (_HEAD.match(path.rpartition(".")[2]) if last is None else path in last)
        and (m.out_features in heights or m.out_features >= _FEW_CLASSES)
    }
    sizes = {m.out_features for m in heads.values()} or {max(heights, default=0)}
    found: dict[str, Style] = {path: Vocab(gather_output=not parallel_loss) for path in heads}
    found.update({path: Vocab() for path, m in tables.items() if m.num_embeddings in sizes})
    refused = {path: reason for path in found if (reason := refusal(modules[path]))}
    while True:  # who shares a weight with what stays whole stays whole, too
        for path in found:
            for partner, _ in conversion.partners(modules[path]):
                if partner not in found or partner in refused:
                    refused.setdefault(path, f"it shares its weight with {partner}, which stays whole")
        if not refused.keys() & found.keys():
            return found
        notes.update(refused)
        found = {path: style for path, style in found.items() if path not in refused}


def refusal(module: nn.Module) -> str | None:
    """Return why a layer cannot be split, ``None`` if it can."""
    reason = why_not_split(module)
    if reason is not None:
        return reason
    if is_transposed(module) or computes_linear(module):
        return None
    base, parallel = (
        (nn.Linear, PlannedLinear) if isinstance(module, nn.Linear) else (nn.Embedding, PlannedEmbedding)
    )
    try:
        parallel_class(type(module), base, parallel)
    except ModelError as error:
        return str(error)
    return None
