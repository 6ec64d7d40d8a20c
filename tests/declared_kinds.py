"""What a collective declares of the tensors that ranks hold, and a trial of it with tensors of those kinds.

A declaration is a line ``Ranks hold: partial -> replicated; gradient: replicated -> replicated.``: the kinds
of what a function takes and gives, then of the gradient that it takes and gives in its backward pass.
"""

import ast
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
KINDS = {"replicated", "varying", "partial", "sharded"}
LINE = re.compile(r"Ranks hold: ([\w, ]+) -> (\w+)(?:; gradient: (\w+) -> ([\w, ]+))?")
GATHERS = ("all_gather_single", "reduce_scatter_single", "all_gather_flat")  # imported by name
COMMUNICATES = re.compile("|".join(["Ranks hold", r"autograd\.Function", r"dist\.", *GATHERS]))
# What torch's collectives make of which kinds. Exchanges of objects carry no tensors.
PRIMITIVES = {
    "all_reduce": ({"partial", "varying"}, {"replicated"}),  # of varying ones a maximum
    "all_gather": ({"sharded", "varying"}, {"replicated"}),
    "all_gather_single": ({"sharded", "varying"}, {"replicated"}),
    "all_gather_flat": ({"sharded", "varying"}, {"replicated"}),
    "reduce_scatter_single": ({"partial"}, {"sharded"}),
    "all_to_all_single": ({"partial", "sharded"}, {"sharded"}),
    "broadcast": ({"sharded", "varying"}, {"replicated"}),
    "send": ({"sharded"}, {"varying"}),
    "recv": ({"sharded"}, {"varying"}),
    "P2POp": ({"varying"}, {"varying"}),
    "batch_isend_irecv": ({"varying"}, {"varying"}),
}


@dataclass(frozen=True)
class Declaration:
    """The kinds of what goes in and comes out; those of the gradient are empty where it has none."""

    takes: tuple[str, ...]
    gives: str
    gradient_takes: str = ""
    gradient_gives: tuple[str, ...] = ()


@dataclass(frozen=True)
class Collective:
    """A function that calls collectives of torch, or one with a backward pass.

    Attributes:
        declared: What it declares.
        calls: The collectives of torch that it calls itself.
        is_function: Whether it is a ``torch.autograd.Function``.
    """

    declared: tuple[Declaration, ...]
    calls: frozenset[str]
    is_function: bool


def collectives(package: str) -> dict[str, Collective]:
    """Return what a package declares, and what it has to declare, by ``module.name``."""
    found: dict[str, Collective] = {}
    for file in sorted((ROOT / "packages" / package / "src").rglob("*.py")):
        source = file.read_text(encoding="utf-8")
        if not COMMUNICATES.search(source):
            continue
        lines = source.splitlines()
        for node in ast.walk(ast.parse(source)):
            is_function = isinstance(node, ast.ClassDef) and any(
                ast.unparse(base).endswith("autograd.Function") for base in node.bases
            )
            if not is_function and not isinstance(node, ast.FunctionDef):
                continue
            if not COMMUNICATES.search("\n".join(lines[node.lineno - 1 : node.end_lineno])):
                continue
            # The docstring and the comments before the first statement.
            begin = next((n.lineno for n in node.body if not _is_text(n)), node.end_lineno)
            text = "\n".join(lines[node.lineno : begin])
            calls = frozenset() if is_function else frozenset(_primitives(node))
            declared = tuple(_parsed(match) for match in LINE.finditer(text))
            if declared or calls or is_function:
                found[f"{file.stem}.{node.name}"] = Collective(declared, calls, is_function)
    return found


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _primitives(function: ast.FunctionDef) -> list[str]:
    called = [ast.unparse(n.func) for n in ast.walk(function) if isinstance(n, ast.Call)]
    names = [name.removeprefix("dist.") for name in called if name.startswith("dist.") or name in GATHERS]
    return [name for name in names if name in PRIMITIVES]


def _parsed(match: re.Match[str]) -> Declaration:
    takes, gives, gradient, of_inputs = match.groups()
    inputs: tuple[str, ...] = ()
    if of_inputs:
        inputs = tuple(of_inputs.split(", "))
    return Declaration(tuple(takes.split(", ")), gives, gradient or "", inputs)


def check_declared(found: Mapping[str, Collective], *, silent: set[str]) -> None:
    """Check that all but some declare what ranks hold, in words that are there, and each its gradient."""
    assert {name for name, one in found.items() if not one.declared} == silent
    for name, one in found.items():
        for declared in one.declared:
            assert {*declared.takes, declared.gives, *declared.gradient_gives} <= KINDS, name
        if one.is_function:
            assert all(declared.gradient_takes for declared in one.declared), name


def check_primitives(found: Mapping[str, Collective]) -> None:
    """Check that each declares what the collective of torch within it does."""
    for name, one in found.items():
        for call in one.calls:
            takes, gives = PRIMITIVES[call]
            (declared,) = one.declared
            assert takes >= {*declared.takes}, (name, call)
            assert declared.gives in gives, (name, call)


# -- Trials ---------------------------------------------------------------------------------------

Split = Callable[[torch.Tensor, int, int], torch.Tensor]
"""From a whole tensor, a dimension and a rank, that rank's part."""


@dataclass(frozen=True)
class Trial:
    """A call of a collective function on a rank, and the same on one device.

    Attributes:
        call: From where the rank stands, and its tensors, what it holds afterwards.
        whole: From whole tensors the whole result.
        inputs: The whole tensors.
        dims: The dimension in which each is cut, where it is; then that of the result.
    """

    call: Callable[..., torch.Tensor]
    whole: Callable[..., torch.Tensor]
    inputs: Sequence[torch.Tensor]
    dims: Sequence[int]


def made(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def held(kind: str, whole: torch.Tensor, dim: int, rank: int, ranks: int, split: Split) -> torch.Tensor:
    """Return what a rank holds of a tensor."""
    if kind == "replicated":
        return whole.clone()
    if kind == "sharded":
        return split(whole, dim, rank).clone()
    assert kind == "partial", kind
    summands = torch.stack([made(*whole.shape, seed=100 + r) for r in range(ranks)])
    return summands[rank] + (whole - summands.sum(0)) / ranks


def tried(
    declared: Declaration, trial: Trial, where: object, rank: int, ranks: int, split: Split
) -> tuple[torch.Tensor, ...]:
    """Return the result on a rank, then the gradients of its inputs."""
    takes = _for_each(declared.takes, trial.inputs)
    inputs = [
        held(kind, tensor, dim, rank, ranks, split)
        for kind, tensor, dim in zip(takes, trial.inputs, trial.dims[:-1], strict=True)
    ]
    if not declared.gradient_takes:
        return (trial.call(where, *inputs).detach(),)
    inputs = [tensor.requires_grad_() for tensor in inputs]
    output = trial.call(where, *inputs)
    gradient = _gradient_of(trial.whole(*trial.inputs))
    mine = held(declared.gradient_takes, gradient, trial.dims[-1], rank, ranks, split)
    return output.detach(), *torch.autograd.grad(output, inputs, mine)


def _for_each(kinds: Sequence[str], tensors: Sequence[torch.Tensor]) -> Sequence[str]:
    return kinds if len(kinds) > 1 else [*kinds] * len(tensors)


def _gradient_of(output: torch.Tensor) -> torch.Tensor:
    return made(*output.shape, seed=7)


def check(
    declared: Declaration, trial: Trial, results: Sequence[tuple[torch.Tensor, ...]], split: Split
) -> None:
    """Compare what ranks hold after a trial with the whole, by the declared kinds."""
    inputs = [tensor.clone().requires_grad_() for tensor in trial.inputs]
    whole = trial.whole(*inputs)
    right, kinds = [whole.detach()], [declared.gives]
    if declared.gradient_takes:
        right += torch.autograd.grad(whole, inputs, _gradient_of(whole))
        kinds += _for_each(declared.gradient_gives, inputs)
    dims = [trial.dims[-1], *trial.dims[:-1]]
    for number, (kind, tensor) in enumerate(zip(kinds, right, strict=True)):
        parts = [result[number] for result in results]
        if kind == "partial":
            torch.testing.assert_close(torch.stack(parts).sum(0), tensor)
            continue
        for rank, part in enumerate(parts):
            expected = held(kind, tensor, dims[number], rank, len(parts), split)
            torch.testing.assert_close(part, expected, msg=lambda m, n=number: f"tensor {n}: {m}")
