"""Plans for any model: proposed by what feeds what in it, and kept only if its own code proves them."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from torch import nn
from tp_core.errors import TpError

from tp_shard._plans._styles import Column, Row, Style
from tp_shard._search._trace import Flow, Region, record_calls, trace
from tp_shard._search._variants import attention_variants, expert_variants, head_counts, plain_variants
from tp_shard._verify._call import Call, cast, first_alone
from tp_shard._verify._compare import Fault, compare
from tp_shard._verify._copies import probe_copy, repeated_blocks
from tp_shard._verify._report import tolerance_of
from tp_shard._verify._runs import Run, rows_of, run_split, run_whole_somehow
from tp_shard.nn._kinds import widths

__all__ = ["Proof", "prove"]

T = TypeVar("T")


@dataclass(slots=True)
class Proof:
    """What trying a model has shown.

    Attributes:
        plan: What was proven, by the names of the modules of the model.
        notes: Why something stays whole or is joined, by name.
        flow: What feeds what.
        probe: The copy on which it was tried.
        call: What it was called with.
        repeats: For the name of each block that is built like another one, the name of that.
    """

    plan: dict[str, Style]
    notes: dict[str, str]
    flow: Flow
    probe: nn.Module
    call: Call
    repeats: dict[str, str] = field(default_factory=dict)

    def everywhere(self, plan: dict[str, T]) -> dict[str, T]:
        """Return a plan, or notes, for the probe as one for the model, with all its blocks that are alike."""
        found = dict(plan)
        for repeat, first in self.repeats.items():
            inside = {n: s for n, s in found.items() if n == first or n.startswith(f"{first}.")}
            found.update({repeat + name[len(first) :]: style for name, style in inside.items()})
        return found

    def verify(self, plan: dict[str, Style], ranks: int) -> Fault | None:
        """Return what differs first if the whole probe is split so."""
        for training in (False, True):
            call = replace(self.call, training=training)
            fault = _tried(self.probe, plan, call, ranks, {})
            if fault is not None:
                return fault
        return None


def prove(model: nn.Module, call: Call, ranks: int) -> Proof:
    """Find what of a model can be split over ``ranks`` ranks.

    Args:
        model: The model; it is not changed.
        call: What it can be called with.
        ranks: How many ranks there are.

    Raises:
        Exception: Whatever the model raises if it cannot be called so.

    Collectives: none.
    """
    probe, call, flow = _traced(model, call)
    proof = Proof({}, {}, flow, probe, call, _repeat_names(model))
    ordered = sorted(flow.regions, key=lambda r: -len(r.columns))
    containers = {r.container for r in ordered} | set(flow.experts)
    calls = record_calls(probe, call, {c for c in containers if _is_called(probe, c)})
    calls = {name: replace(inner, loss=first_alone) for name, inner in calls.items()}
    for region in ordered:
        names = {*region.columns, region.row}
        if names & proof.plan.keys() or any(_shares(probe, name) for name in names):
            continue
        inner = calls.get(region.container)
        if inner is None:
            proof.notes[region.row] = "no module around it and what feeds it is called"
            continue
        found, reason = _first_right(
            probe, region.container, _proposals(probe, region, inner, ranks), inner, ranks
        )
        if found is None and region.is_attention:
            counts = ", ".join(f"{q} and {kv}" for q, kv in head_counts(probe, region)) or "not known"
            joined: dict[str, Style] = {
                **{n: Column(gather_output=True) for n in region.columns},
                region.row: Row(),
            }
            found, _ = _first_right(probe, region.container, iter([joined]), inner, ranks)
            if found is not None:
                proof.notes[region.container] = (
                    f"its layers are split, but their outputs joined: heads ({counts}) could not be divided "
                    f"over {ranks} ranks: {reason}"
                )
        if found is None:
            proof.notes[region.container] = reason or "no way to split it is known"
        else:
            proof.plan.update(found)
    for path in flow.experts:
        if path in calls:
            found, reason = _first_right(
                probe, path, expert_variants(probe, path, calls[path]), calls[path], ranks
            )
            if found is None:
                proof.notes[path] = reason or "its parameters are not column and row weights of experts"
            else:
                proof.plan.update(found)
    return proof


def _traced(model: nn.Module, call: Call) -> tuple[nn.Module, Call, Flow]:
    """Run a copy of a model; in float64, if it can."""
    try:
        return _traced_in(model, call, torch.float64)
    except Exception:  # noqa: BLE001 - kernels that know float32 alone, for one
        return _traced_in(model, call, torch.float32)


def _traced_in(model: nn.Module, call: Call, dtype: torch.dtype) -> tuple[nn.Module, Call, Flow]:
    probe = probe_copy(model, dtype=dtype, random=True, share=True)
    call = replace(call, args=cast(call.args, dtype), kwargs=cast(call.kwargs, dtype))
    return probe, call, trace(probe, call)


def _proposals(model: nn.Module, region: Region, call: Call, ranks: int) -> Iterator[dict[str, Style]]:
    if region.is_attention:
        return attention_variants(model, region, call, ranks)
    if widths(model.get_submodule(region.row))[0] < ranks:
        return iter([])
    return plain_variants(model, region)


def _first_right(
    model: nn.Module, container: str, proposals: Iterator[dict[str, Style]], call: Call, ranks: int
) -> tuple[dict[str, Style] | None, str | None]:
    """Return the first plan for a module, with names of the whole model, that changes no number of it."""
    module = model.get_submodule(container)
    reason = None
    known: dict[bool, tuple[Run, Call]] = {}
    start = f"{container}." if container else ""
    for plan in proposals:
        inside = {name[len(start) :] if name != container else "": style for name, style in plan.items()}
        if any(not (name == container or name.startswith(start)) for name in plan):
            inside = {n[len(start) :]: s for n, s in plan.items() if n.startswith(start)}
            if container in plan:
                inside[""] = plan[container]
        fault = _tried(module, inside, call, ranks, known)
        if fault is None:
            return plan, None
        reason = reason or str(fault).replace("the model", container or "the model", 1)
    return None, reason


def _tried(
    module: nn.Module, plan: dict[str, Style], call: Call, ranks: int, known: dict[bool, tuple[Run, Call]]
) -> Fault | None:
    dtype = next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float64)
    try:
        if call.training not in known:
            known[call.training] = run_whole_somehow(module, call, frozenset(rows_of(module, plan)))
        whole, call = known[call.training]
        runs = run_split(module, plan, call, ranks)
    except TpError as error:
        return Fault("", "cannot be split so", str(error))
    return compare(whole, runs, tolerance=tolerance_of(dtype)).fault


def _repeat_names(model: nn.Module) -> dict[str, str]:
    names = {id(m): name for name, m in model.named_modules()}
    return {names[repeat]: names[first] for repeat, first in repeated_blocks(model).items()}


def _shares(model: nn.Module, name: str) -> bool:
    """Whether another module has the weight of this one: that is a table of the vocabulary."""
    layer = model.get_submodule(name)
    weight = layer._parameters.get("weight")
    return any(m is not layer and any(p is weight for p in m._parameters.values()) for m in model.modules())


def _is_called(model: nn.Module, path: str) -> bool:
    return not isinstance(model.get_submodule(path), nn.ModuleList | nn.ModuleDict)
