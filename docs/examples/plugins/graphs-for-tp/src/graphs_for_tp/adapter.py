"""Graphs dealt out so that every device has nearly as many nodes and edges."""

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

from tp_core.data import Parts
from tp_core.plugins import CollateAdapter, Verdict

__all__ = ["GraphAdapter", "deal", "graph_cost"]


class GraphAdapter(CollateAdapter):
    """Splits lists of ``torch_geometric`` graphs; a part's work is that of its nodes and edges.

    A sample is a ``Data`` or ``HeteroData``, or a tuple, list or dict with one among its values: a
    pair of a graph and its label, say. The user's own collate function makes each part.
    """

    name: ClassVar[str] = "graphs"

    def assess(self, sample: Any, parts: int) -> Verdict:
        """Fit samples with a graph, and better than adapters for samples of any type."""
        if not _graphs(sample):
            return Verdict.unfit(f"a {type(sample).__name__} has no graph of torch_geometric in it")
        return Verdict.fits(40, f"{parts} parts with nearly as many nodes and edges")

    def adapt(
        self,
        collate_fn: Callable[[list[Any]], Any],
        *,
        parts: int,
        weights: Sequence[float] | None = None,
        cost: Callable[[Any], float] | None = None,
    ) -> Callable[[list[Any]], Parts]:
        """Return a collate function that makes one batch of graphs for each device."""
        cost_of = cost or graph_cost

        def collate(samples: list[Any]) -> Parts:
            hands = deal([cost_of(sample) for sample in samples], parts, weights)
            batches = [collate_fn([samples[i] for i in hand]) for hand in hands]
            order = [i for hand in hands for i in hand]
            return Parts(batches, counts=[len(hand) for hand in hands], order=order)

        return collate


def graph_cost(sample: Any) -> float:
    """Return the nodes and edges of a sample's graphs: message passing does work for each."""
    return float(sum((graph.num_nodes or 0) + graph.num_edges for graph in _graphs(sample)))


def deal(
    costs: Sequence[float], parts: int, weights: Sequence[float] | None = None
) -> list[list[int]]:
    """Return which samples each part gets, none of them empty.

    The dearest sample goes first, each to the part that is done with it first: no part takes longer
    than 4/3 of the best possible (Graham, 1969).
    """
    parts = min(parts, len(costs))
    speeds = [1.0] * parts if weights is None else list(weights)
    hands: list[list[int]] = [[] for _ in range(parts)]
    loads = [0.0] * parts
    for sample in sorted(range(len(costs)), key=lambda i: -costs[i]):
        done = [(loads[part] + costs[sample]) / speeds[part] for part in range(parts)]
        chosen = min(range(parts), key=lambda part: (bool(hands[part]), done[part]))
        hands[chosen].append(sample)
        loads[chosen] += costs[sample]
    return [sorted(hand) for hand in hands]


def _graphs(sample: Any) -> list[Any]:
    # Where nobody has imported the library, no sample is of it, and asking must stay cheap.
    data = sys.modules.get("torch_geometric.data")
    if data is None:
        return []
    if isinstance(sample, data.Data | data.HeteroData):
        return [sample]
    values: Iterable[Any] = ()
    if isinstance(sample, dict):
        values = sample.values()
    elif isinstance(sample, tuple | list):
        values = sample
    return [value for value in values if isinstance(value, data.Data | data.HeteroData)]
