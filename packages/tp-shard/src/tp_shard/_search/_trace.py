"""The flow between the layers of a model, from autograd's graph of one run and not from their names.

If the outputs of some linear layers reach one other linear layer and nothing else, they are column layers and
that one is their row layer: up to it each rank can compute its part of the features or heads.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tp_shard._groups._collectives import apply
from tp_shard._plans._adapters import modules_inside
from tp_shard._verify._examples import TrialCall, fresh, tensors_of
from tp_shard.nn._convert import is_linear

_FEW = 3  # names in a message
_MIXING = ("Bmm", "Baddbmm", "ScaledDotProduct", "Softmax")


@dataclass(frozen=True, slots=True)
class Region:
    """Column layers, their row layer, and the parameters and dropouts between them.

    Attributes:
        tables: Embeddings with outputs that reach row layers alone: a bias for each head.
        parameters: The names of other parameters between them.
        dropouts: The names of dropouts between them.
        is_attention: Whether positions are mixed between them, so that heads have to stay whole.
    """

    columns: tuple[str, ...]
    row: str
    tables: tuple[str, ...]
    parameters: tuple[str, ...]
    dropouts: tuple[str, ...]
    is_attention: bool

    @property
    def container(self) -> str:
        """The name of the innermost module around the region."""
        return innermost_around((*self.columns, self.row))


def innermost_around(names: Iterable[str]) -> str:
    """Return the name of the innermost module that contains all of these."""
    paths = [name.split(".")[:-1] for name in names]
    common = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    return ".".join(common)


@dataclass(slots=True)
class Flow:
    """The flow between the layers of a model, from one run.

    Attributes:
        regions: The pairs of column and row layers.
        heads: The linear layers with outputs that the model returns.
        experts: The modules with experts' weights of their own.
        why: The reasons why linear layers are in no region, by name.
    """

    regions: list[Region] = field(default_factory=list)
    heads: list[str] = field(default_factory=list)
    experts: list[str] = field(default_factory=list)
    called: frozenset[str] = frozenset()
    why: dict[str, str] = field(default_factory=dict)


def is_experts(module: nn.Module) -> bool:
    """Return whether a module has experts' weights, of three dimensions, and no linear layers inside."""
    weights = [p for p in module._parameters.values() if p is not None and p.dim() == 3 and p.size(0) > 1]
    return len(weights) > 1 and not any(is_linear(m) for m in module.modules())


class _Mark(torch.autograd.Function):
    """The identity, which marks a place in the graph. Forward and backward: no collective."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, index: int) -> Tensor:
        ctx.index = index
        return tensor.clone()  # no view: the model may write into the output in place

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # noqa: ARG004 - torch's signature
        return grad, None


@dataclass(slots=True)
class _Called:
    path: str
    module: nn.Module
    into: list[Any] = field(default_factory=list)  # the graph nodes of its inputs


@dataclass(slots=True)
class _Ancestors:
    """The marks and leaves among the ancestors of a module's input in autograd's graph."""

    sources: set[int] = field(default_factory=set)
    passed: set[int] = field(default_factory=set)  # dropouts, which do not end the walk
    leaves: list[Tensor] = field(default_factory=list)
    mixes: bool = False


def trace(model: nn.Module, call: TrialCall) -> Flow:
    """Run a copy of a model in evaluation mode, with gradients of all parameters; return its flow."""
    model.eval()
    model.requires_grad_(True)
    calls: list[_Called] = []
    handles = []
    inside = modules_inside(model)
    for path, module in model.named_modules():
        if id(module) in inside:
            continue  # a layer and its adapters are one
        if is_linear(module) or isinstance(module, nn.Embedding | nn.Dropout) or is_experts(module):
            handles.append(
                module.register_forward_hook(
                    lambda m, args, kwargs, output, p=path: _called(calls, p, m, (args, kwargs), output),
                    with_kwargs=True,
                )
            )
    try:
        with torch.enable_grad():
            output = model(*fresh(call.args), **{name: fresh(v) for name, v in call.kwargs.items()})
    finally:
        for handle in handles:
            handle.remove()
    by_call = [_walk(called.into, calls) for called in calls]
    end = _walk([t.grad_fn for _, t in tensors_of(output)], calls)
    names = {id(p): name for name, p in model.named_parameters()}
    return _flow(calls, by_call, end, names)


def _called(calls: list[_Called], path: str, module: nn.Module, arguments: Any, output: Any) -> Any:
    into = [tensor.grad_fn for _, tensor in tensors_of(arguments) if tensor.grad_fn is not None]
    calls.append(_Called(path, module, into))
    if isinstance(output, Tensor) and output.requires_grad:
        return apply(_Mark, output, len(calls) - 1)
    return output


def _walk(start: list[Any], calls: list[_Called]) -> _Ancestors:
    ancestors = _Ancestors()
    seen: set[Any] = set()
    waiting = list(start)
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(node, _Mark._backward_cls):
            index: int = getattr(node, "index")  # noqa: B009 - set by forward, unknown to the type checker
            if not isinstance(calls[index].module, nn.Dropout):
                ancestors.sources.add(index)
                continue
            ancestors.passed.add(index)
        elif hasattr(node, "variable"):
            ancestors.leaves.append(node.variable)
        ancestors.mixes = ancestors.mixes or any(word in node.name() for word in _MIXING)
        waiting += [following for following, _ in node.next_functions]
    return ancestors


def _flow(calls: list[_Called], by_call: list[_Ancestors], end: _Ancestors, names: dict[int, str]) -> Flow:
    takers: dict[int, set[str]] = {}
    for call, ancestors in zip(calls, by_call, strict=True):
        if not isinstance(call.module, nn.Dropout):
            for source in ancestors.sources:
                takers.setdefault(source, set()).add(call.path)
    for source in end.sources:
        takers.setdefault(source, set()).add("")
    regions_by_row: dict[str, set[Region | None]] = {}
    rows = {call.path for call in calls if is_linear(call.module)}
    for call, ancestors in zip(calls, by_call, strict=True):
        if is_linear(call.module):
            region = _region(call, ancestors, calls, takers, names, rows)
            regions_by_row.setdefault(call.path, set()).add(region)
    regions = []
    for kinds in regions_by_row.values():
        if len(kinds) == 1:  # all calls of the row layer agree
            regions += [region for region in kinds if region is not None]
    paired = {name for region in regions for name in (*region.columns, region.row)}
    at_end = {calls[source].path for source in end.sources}
    linears = dict.fromkeys(call.path for call in calls if is_linear(call.module))
    return Flow(
        regions,
        [path for path in linears if path in at_end],
        list(dict.fromkeys(call.path for call in calls if is_experts(call.module))),
        frozenset(call.path for call in calls),
        _why_whole(calls, by_call, takers, paired),
    )


def _why_whole(
    calls: list[_Called], by_call: list[_Ancestors], takers: dict[int, set[str]], paired: set[str]
) -> dict[str, str]:
    """Return the reasons why linear layers are neither column nor row layers, by name."""
    takers_of: dict[str, set[str]] = {}
    fed: dict[str, set[str]] = {}
    for index, (call, ancestors) in enumerate(zip(calls, by_call, strict=True)):
        takers_of.setdefault(call.path, set()).update(takers.get(index, ()))
        fed.setdefault(call.path, set()).update(calls[i].path for i in ancestors.sources)
    why: dict[str, str] = {}
    for call in calls:
        if call.path in paired or not is_linear(call.module):
            continue
        to = sorted(name for name in takers_of[call.path] if name)
        if len(to) == 1:
            sources = sorted(fed[to[0]] - {call.path})
            if sources:
                why[call.path] = f"its outputs reach {to[0]}, which also takes what {_some(sources)} make"
            else:
                why[call.path] = f"its outputs reach {to[0]} by more than one path"
        elif to:
            why[call.path] = f"its outputs reach {_some(to)}, and not one layer alone"
        else:
            why[call.path] = "its outputs reach no other linear layer"
    return why


def _some(names: list[str]) -> str:
    listed = ", ".join(names[:_FEW])
    if len(names) > _FEW:
        listed = f"{listed} and {len(names) - _FEW} more"
    return listed


def _region(
    row: _Called,
    ancestors: _Ancestors,
    calls: list[_Called],
    takers: dict[int, set[str]],
    names: dict[int, str],
    linears: set[str],
) -> Region | None:
    columns: list[str] = []
    tables: list[str] = []
    for source in sorted(ancestors.sources):
        column = calls[source]
        if is_linear(column.module) and takers[source] == {row.path}:
            columns.append(column.path)
        elif isinstance(column.module, nn.Embedding) and ancestors.mixes and takers[source] <= linears:
            tables.append(column.path)
        else:
            return None
    parameters = [names.get(id(leaf)) for leaf in ancestors.leaves]
    if not columns or row.path in columns or None in parameters:
        return None
    return Region(
        tuple(dict.fromkeys(columns)),
        row.path,
        tuple(dict.fromkeys(tables)),
        tuple(sorted(name for name in parameters if name)),
        tuple(sorted({calls[i].path for i in ancestors.passed})),
        ancestors.mixes,
    )


def record_calls(model: nn.Module, call: TrialCall, paths: set[str]) -> dict[str, TrialCall]:
    """Run a model, and return the first call of each of the named modules."""
    recorded: dict[str, TrialCall] = {}

    def note(path: str, args: Any, kwargs: Any) -> None:
        if path not in recorded:
            recorded[path] = TrialCall(fresh(args), {name: fresh(v) for name, v in kwargs.items()})

    modules = dict(model.named_modules())
    handles = [
        modules[path].register_forward_pre_hook(lambda _m, a, k, p=path: note(p, a, k), with_kwargs=True)
        for path in paths
    ]
    try:
        with torch.enable_grad():
            model(*fresh(call.args), **{n: fresh(v) for n, v in call.kwargs.items()})
    finally:
        for handle in handles:
            handle.remove()
    return recorded
