"""A table of a model's layers: their parameters on this rank, and their collectives."""

from dataclasses import dataclass

from torch import nn
from tp_core.arguments import explain_arguments
from tp_core.errors import ModelError

from tp_shard._shards import ParallelLayer
from tp_shard.nn._layers import ParallelLinear
from tp_shard.nn._margins import MarginCrossEntropy
from tp_shard.nn._planned import PlannedEmbedding, PlannedLinear, SequenceMixin


@dataclass(frozen=True, slots=True)
class LayerSummary:
    """One layer of a model.

    Attributes:
        name: Its name in the model.
        kind: The kind of its split.
        full_shape: The shape of its weight over all ranks.
        local_shape: The shape of this rank's shard.
        nbytes: The bytes of its own parameters on this rank; tied ones count for the first layer.
        collectives: Its collectives in a training step, forward and backward.
    """

    name: str
    kind: str
    full_shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    nbytes: int
    collectives: str


@dataclass(frozen=True, slots=True)
class Summary:
    """The layers of a model that have parameters; printed it is a table."""

    layers: tuple[LayerSummary, ...]

    @property
    def nbytes(self) -> int:
        """The bytes of all parameters on this rank."""
        return sum(layer.nbytes for layer in self.layers)

    def __str__(self) -> str:
        head = ("layer", "kind", "full", "local", "bytes per rank", "collectives per step")
        rows = [
            (
                row.name,
                row.kind,
                _shape(row.full_shape),
                _shape(row.local_shape),
                f"{row.nbytes:,}",
                row.collectives,
            )
            for row in self.layers
        ]
        rows.append(("all", "", "", "", f"{self.nbytes:,}", ""))
        widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in [head, *rows]
        )


@explain_arguments("summary(model)")
def summary(model: nn.Module) -> Summary:
    """Return a table of the layers of a model: their parameters on this rank, and their collectives.

    Args:
        model: Any model.

    Example:
        >>> print(summary(torch.nn.Sequential(ParallelLinear(4, 6, dim=-1))))
        layer  kind    full    local   bytes per rank  collectives per step
        0      column  (6, 4)  (6, 4)  120             none
        all                            120
    """
    if not isinstance(model, nn.Module):
        msg = f"summary() takes a model, a torch.nn.Module, got {type(model).__name__}: {model!r:.80}"
        raise ModelError(msg)
    seen: set[int] = set()
    layers = []
    for name, module in model.named_modules():
        own = {k: p for k, p in module._parameters.items() if p is not None}
        if not own:
            continue
        key = "weight" if "weight" in own else next(iter(own))
        local = tuple(own[key].shape)
        if isinstance(module, ParallelLayer):
            split = module.splits.get(key)
        else:
            split = None
        nbytes = sum(p.numel() * p.element_size() for p in own.values() if id(p) not in seen)
        seen.update(id(p) for p in own.values())
        full = local if split is None else split.full_shape(local)
        layers.append(LayerSummary(name, _kind(module), full, local, nbytes, _collectives(module)))
    return Summary(tuple(layers))


def _shape(shape: tuple[int, ...]) -> str:
    return "(" + ", ".join(map(str, shape)) + ")"


def _kind(module: nn.Module) -> str:
    if isinstance(module, SequenceMixin):
        if module.part_of == "sequence":
            return "sequence"
        return "replicated, summed"
    if not isinstance(module, ParallelLayer) or module.dim is None:
        return "replicated"
    if isinstance(module, ParallelLinear):
        if module.dim == 0:
            return "row"
        return "column"
    if isinstance(module, MarginCrossEntropy):
        return "classes"
    if module.dim == 0:
        return "vocabulary"
    return "features"


def _collectives(module: nn.Module) -> str:
    """Return the collectives of a layer, as its docstring names them."""
    if isinstance(module, SequenceMixin):
        if module.sequence_group.size == 1:
            return "none"
        return "all-reduce backward (one for all such gradients)"
    if not isinstance(module, ParallelLayer) or module.group.size == 1:
        return "none"
    if isinstance(module, MarginCrossEntropy):  # its gradients are computed in the forward pass
        return "all-gather forward, all-reduce forward"
    names = []
    if isinstance(module, PlannedLinear) and module.sequence is not None and module.dim is not None:
        if module.dim == 0:
            names = ["reduce-scatter forward", "all-gather backward"]
            if module.bias is not None:
                names.append("all-reduce backward (one for all such gradients)")
        else:
            names = ["all-gather forward", "reduce-scatter backward"]
    elif module.dim == 0:
        names = ["all-reduce forward"]
    elif module.dim is not None and isinstance(module, ParallelLinear):
        names = ["all-reduce backward"]
    if getattr(module, "gather_output", False) and module.dim not in (None, 0):
        names.append("all-gather forward")
    if isinstance(module, PlannedEmbedding) and module.sequence is not None:
        names.append("all-gather backward")
    if isinstance(module, PlannedLinear):
        from tp_shard.nn._heads import _shared

        shared = [split for split in module.splits.values() if _shared(split)]
        names += ["all-reduce backward (shared heads)"] * len(shared)
    return ", ".join(names) or "none"
