"""Plans for any model: proposed from the flow between its layers, and kept only if a run proves them."""

import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import TypeVar

import torch
from torch import nn
from tp_core.errors import ConfigError, ModelError, TpError

from tp_shard._plans._adapters import inside_peft
from tp_shard._plans._modules import ancestors
from tp_shard._plans._styles import Column, Experts, Local, Replicated, Row, Style, Vocab
from tp_shard._search._trace import Flow, Region, innermost_around, record_calls, trace
from tp_shard._search._variants import attention_variants, expert_variants, head_counts, plain_variants
from tp_shard._verify._examples import (
    TrialCall,
    bytes_needed,
    cast,
    first_alone,
    first_line,
    other_calls,
    probe_copy,
    repeated_blocks,
    without_cache,
)
from tp_shard._verify._report import Fault, compare, compare_ranks, missed
from tp_shard._verify._simulate import TrialRun, reference, rows_of, run_split, takes
from tp_shard.nn._convert import base_of, is_linear, widths

T = TypeVar("T")


@dataclass(slots=True)
class Proof:
    """The result of trying plans on a model.

    Attributes:
        notes: The reasons why modules stay whole or are joined, by name.
        probe: The copy of the model on which plans were tried.
        calls: The calls that were tried: the given one, and one with values and shapes of tp's own.
        repeats: The name of each block that is built like an earlier one and shares a module with it in the
            copy, with the name of the earlier one.
        unreached: The split modules that no call reached.
        together: Sets of names that belong together in the plan: column layers, their row layer, and the
            modules between.
    """

    plan: dict[str, Style]
    notes: dict[str, str]
    flow: Flow
    probe: nn.Module
    calls: list[TrialCall]
    repeats: dict[str, str] = field(default_factory=dict)
    unreached: list[str] = field(default_factory=list)
    together: list[frozenset[str]] = field(default_factory=list)

    def everywhere(self, plan: dict[str, T]) -> dict[str, T]:
        """Return a plan, or notes, for the whole model: entries of the probe count for all equal blocks."""
        result = dict(plan)
        for repeat, first in self.repeats.items():
            inside = {n: s for n, s in result.items() if first in ancestors(n)}
            result.update({repeat + name[len(first) :]: style for name, style in inside.items()})
        return result

    def verify(self, plan: dict[str, Style], ranks: int) -> Fault | None:
        """Split the whole probe by a plan, and return the first difference in any of the calls."""
        unreached = set(plan)
        for call in self.calls:
            for training in (False, True):
                whole, tried = _whole_runs(self.probe, replace(call, training=training), plan)
                fault = _split_fault(self.probe, plan, whole, tried, ranks)
                if fault is None and training and call is self.calls[0]:
                    fault = _fault_with_dropout(self.probe, plan, whole, tried, ranks)
                if fault is not None:
                    return fault
                unreached &= set(missed(self.probe, whole))
        self.unreached = sorted(unreached)
        return None

    def without(self, plan: dict[str, Style], fault: Fault, ranks: int) -> dict[str, Style]:
        """Return a plan without the block of a fault, or without the blocks that are wrong alone."""
        blocks = [*self.together, frozenset(plan).difference(*self.together)]
        if fault.module:
            path = fault.module
            while not (inside := {n for n in plan if path in ancestors(n)}):
                path = path.rpartition(".")[0]
            wrong = set(inside)
            if any(not isinstance(plan[name], Replicated) for name in inside):  # these can be left out alone
                wrong |= {n for block in self.together if block & inside for n in block}
            self.notes[fault.module] = fault.reason
        else:  # no module inside shows the difference
            wrong = set()
            for block in blocks:
                alone = {name: plan[name] for name in block if name in plan}
                if not alone or alone == plan:
                    continue
                own_fault = self.verify(alone, ranks)
                if own_fault is not None:
                    wrong |= block
                    self.notes[innermost_around(block)] = own_fault.reason
            if not wrong & plan.keys():
                wrong = set(plan)
                self.notes[""] = fault.reason
        where = fault.module or "the model"
        for name in wrong:
            if isinstance(plan.get(name), Column | Row | Vocab):
                self.notes.setdefault(name, f"it would be split together with {where}, where {fault.reason}")
        return {name: style for name, style in plan.items() if name not in wrong}

    def __str__(self) -> str:
        """Return the calls that the plan was proven for, and the modules that it was not proven for."""
        lines = ["proven for " + "; and, with values of tp's own, ".join(map(str, self.calls))]
        if self.repeats:
            lines.append("equal blocks were tried as one, because memory is short")
        if self.unreached:
            lines.append(f"not proven, because no call reached it: {', '.join(self.unreached)}")
        return "\n".join(lines)


def prove(model: nn.Module, call: TrialCall, ranks: int) -> Proof:
    """Find the modules of a model that can be split over ``ranks`` ranks.

    Equal blocks are tried once. They share one module in the copy of the model if the ranks
    could not each verify a whole copy in half of the machine's memory.

    Collectives: none.
    """
    # By all of the memory, and not by the free one: every rank has to find the same plan.
    share = 2 * ranks * bytes_needed(model, torch.float64, share=False) > _memory()
    probe, call, flow = _traced(model, call, share=share)
    other = next((other for other in other_calls(probe, call) if takes(probe, other)), None)
    calls_to_prove = [call] if other is None else [call, other]
    repeats = _repeat_names(model)
    proof = Proof({}, {}, flow, probe, calls_to_prove, repeats)
    ordered = sorted(flow.regions, key=lambda r: -len(r.columns))
    containers = {r.container for r in ordered} | set(flow.experts)
    containers = {c for c in containers if _is_called(probe, c) and not _is_inside(c, repeats)}
    recorded = [record_calls(probe, each, containers) for each in proof.calls]
    calls = {
        path: [replace(inner[path], loss=first_alone) for inner in recorded if path in inner]
        for path in containers
    }
    for region in ordered:
        names = {*region.columns, region.row}
        if names & proof.plan.keys() or any(_shares(probe, name) for name in names):
            shared = f"of {', '.join(sorted(names))}, one shares its weight or is split otherwise"
            proof.flow.why.update(dict.fromkeys(names, shared))
            continue
        inner = calls.get(region.container)
        if _is_inside(region.row, repeats):
            continue
        if not inner:
            proof.notes[region.row] = "no module around it and what feeds it is called"
            continue
        proposals = _proposals(probe, region, inner[0], ranks)
        plan, reason = _first_right(probe, region.container, proposals, inner, ranks)
        if plan is None and region.is_attention:
            counts = ", ".join(f"{q} and {kv}" for q, kv in head_counts(probe, region)) or "not known"
            joined: dict[str, Style] = {
                **{n: Column(gather_output=True) for n in region.columns},
                region.row: Row(),
            }
            plan, _ = _first_right(probe, region.container, iter([joined]), inner, ranks)
            if plan is not None:
                proof.notes[region.container] = (
                    f"its layers are split, but their outputs joined: heads ({counts}) could not be divided "
                    f"over {ranks} ranks: {reason}"
                )
        if plan is None:
            proof.notes[region.container] = reason or "no split of it is known"
        else:
            proof.plan.update(plan)
            proof.together.append(frozenset(plan))
    for path in flow.experts:
        if calls.get(path):
            proposals = expert_variants(probe, path, calls[path][0])
            plan, reason = _first_right(probe, path, proposals, calls[path], ranks)
            if plan is None:
                proof.notes[path] = reason or "its parameters are not column and row weights of experts"
            else:
                proof.plan.update(plan)
    if not share:  # from here on each repeated block is tried as it is
        for repeat, first in proof.repeats.items():
            proof.together += [
                frozenset(repeat + name[len(first) :] for name in block)
                for block in proof.together
                if all(first in ancestors(name) for name in block)
            ]
        proof.plan = proof.everywhere(proof.plan)
        proof.notes = proof.everywhere(proof.notes)
        proof.repeats = {}
    return proof


def _memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _traced(model: nn.Module, call: TrialCall, *, share: bool) -> tuple[nn.Module, TrialCall, Flow]:
    """Run a copy of a model in float64, or in float32 if that fails."""
    try:
        return _traced_in(model, call, torch.float64, share=share)
    except Exception:  # noqa: BLE001 - some kernels take float32 alone
        return _traced_in(model, call, torch.float32, share=share)


def _traced_in(
    model: nn.Module, call: TrialCall, dtype: torch.dtype, *, share: bool
) -> tuple[nn.Module, TrialCall, Flow]:
    probe = probe_copy(model, dtype=dtype, random=True, share=share)
    call = replace(call, args=cast(call.args, dtype), kwargs=cast(call.kwargs, dtype))
    call = without_cache(probe, call)
    return probe, call, trace(probe, call)


def _proposals(model: nn.Module, region: Region, call: TrialCall, ranks: int) -> Iterator[dict[str, Style]]:
    if region.is_attention:
        return attention_variants(model, region, call, ranks)
    if widths(model.get_submodule(region.row))[0] < ranks:
        return iter([])
    return plain_variants(model, region)


def _first_right(
    model: nn.Module,
    container: str,
    proposals: Iterator[dict[str, Style]],
    calls: list[TrialCall],
    ranks: int,
) -> tuple[dict[str, Style] | None, str | None]:
    """Return the first plan for a module that changes no number of it; its names are the model's."""
    module = model.get_submodule(container)
    reason = None
    wholes: list[tuple[TrialRun, TrialCall]] = []
    start = f"{container}." if container else ""
    for plan in proposals:
        inside = {name[len(start) :] if name != container else "": style for name, style in plan.items()}
        if any(not (name == container or name.startswith(start)) for name in plan):
            inside = {n[len(start) :]: s for n, s in plan.items() if n.startswith(start)}
            if container in plan:
                inside[""] = plan[container]
        try:
            wholes = wholes or [_whole_runs(module, call, inside) for call in calls]
        except ModelError as error:
            return None, str(error).replace(type(module).__name__, "alone it", 1)
        faults = (_split_fault(module, inside, whole, call, ranks) for whole, call in wholes)
        fault = next((fault for fault in faults if fault is not None), None)
        if fault is None:
            return plan, None
        reason = reason or str(fault).replace("the model", container or "the model", 1)
    return None, reason


def _whole_runs(module: nn.Module, call: TrialCall, plan: dict[str, Style]) -> tuple[TrialRun, TrialCall]:
    """Run a module that is not split."""
    try:
        return reference(module, call, frozenset(rows_of(module, plan)))
    except Exception as error:
        mode = "training" if call.training else "evaluation"
        msg = f"{type(module).__name__} fails in {mode}, not split: {first_line(error)}"
        raise ModelError(msg) from error


def _split_fault(
    module: nn.Module, plan: dict[str, Style], whole: TrialRun, call: TrialCall, ranks: int
) -> Fault | None:
    try:
        runs = run_split(module, plan, call, ranks)
    except TpError as error:
        return Fault("", "cannot be split so", str(error))
    return compare(whole, runs).fault


def _fault_with_dropout(
    module: nn.Module, plan: dict[str, Style], whole: TrialRun, call: TrialCall, ranks: int
) -> Fault | None:
    return compare_ranks(whole, run_split(module, plan, call, ranks, dropout=True))


def _repeat_names(model: nn.Module) -> dict[str, str]:
    names = {id(m): name for name, m in model.named_modules()}
    return {names[repeat]: names[first] for repeat, first in repeated_blocks(model).items()}


def _shares(model: nn.Module, name: str) -> bool:
    """Return whether another module shares the weight of this one, as a table of the vocabulary does."""
    layer = base_of(model.get_submodule(name))
    weight = layer._parameters.get("weight")
    return weight is not None and any(
        m is not layer and any(p is weight for p in m._parameters.values()) for m in model.modules()
    )


def _is_called(model: nn.Module, path: str) -> bool:
    return not isinstance(model.get_submodule(path), nn.ModuleList | nn.ModuleDict)


def _is_inside(path: str, blocks: Collection[str]) -> bool:
    return any(around in blocks for around in ancestors(path))


# -- The translation of a transformers model's own plan -------------------------------------------


_SPLIT = ("colwise", "rowwise", "moe_tp_experts")
_VOCABULARY = ("embedding_rowwise", "embedding_colwise")


def translate(model: nn.Module) -> dict[str, str]:
    """Return the entry of a transformers model's own plan for each of its modules, by name."""
    start, model = inside_peft(model)
    words = _named(model)
    if not start:
        return words
    return {f"{start}.{path}": word for path, word in words.items()}


def _named(model: nn.Module) -> dict[str, str]:
    rules = dict(getattr(model, "_tp_plan", None) or {})
    config = getattr(model, "config", None)
    if not rules and config is not None:
        base = getattr(model, "base_model_prefix", "")
        start = f"{base}." if base and hasattr(model, base) else ""
        of_base = getattr(config, "base_model_tp_plan", None) or {}
        rules = {start + name: word for name, word in of_base.items()}
    words = {
        path: word
        for path, _ in model.named_modules()
        for pattern, word in rules.items()
        if fnmatchcase(path, pattern) and path.count(".") == pattern.count(".")
    }
    of_blocks = {path: word for path, word in words.items() if _is_block(word) and not _is_head(model, path)}
    if not of_blocks:
        msg = (
            f"{type(model).__name__} brings no plan of its blocks along (base_model_tp_plan in its "
            "configuration); take ts.plans.auto(model), which needs none"
        )
        raise ConfigError(msg)
    return of_blocks


def restrict(proof: Proof, named: dict[str, str]) -> None:
    """Reduce a proof to the modules that the plan of transformers names, and raise if one is not proven."""
    first = {name: word for name, word in named.items() if not _is_inside(name, proof.repeats)}
    plan = proof.plan
    for name, word in first.items():
        if name in plan or name not in proof.flow.called:
            continue  # modules that a small batch does not reach, such as a branch for images, stay whole
        reason = next((proof.notes[p] for p in ancestors(name) if p in proof.notes), "nothing feeds it alone")
        msg = (
            f"{name} is {word!r} in the plan of transformers, and could not be proven right: {reason}. Write "
            "its styles by hand (Column(), Row(), Local()), verify them with ts.verify(), or take "
            "ts.plans.auto(), which leaves it whole"
        )
        raise ModelError(msg)
    blocks = ({name.rpartition(".")[0] for name in first} | set(first)) - {""}
    for name, style in list(plan.items()):
        of_blocks = isinstance(style, Column | Row | Experts | Local | Replicated)
        if not of_blocks or not _is_inside(name, blocks):
            del plan[name]


def _is_block(word: str) -> bool:
    return any(kind in word for kind in _SPLIT) and word not in _VOCABULARY


def _is_head(model: nn.Module, path: str) -> bool:
    return is_linear(model.get_submodule(path)) and "." not in path
