"""The judge `spmd-types`: a checker of how ranks hold tensors, in a program's step, by its documents."""

import traceback
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from tp_core.ranks import RankPool
from tp_core.tensors import is_dtensor
from tp_verify import Strategy

from tests.silentbench._programs import Program
from tests.silentbench._runs import built, join, make_optimizer, micro_batches

FUNCTIONS = ("Copy", "Sum", "Gather")
"""The names that programs give to their functions that communicate."""

WHOLE = ("I", "R")
"""How a user may declare a weight that all ranks have: its gradient is the same on ranks, or a summand."""


def refused_by_types(program: Program, pool: RankPool, *, right: bool, whole: str) -> tuple[str, str]:
    """Return what the checker refuses in a step of a program, and why it cannot check the program.

    What a user declares is this: a whole weight is R where ranks have other rows, and else as ``whole``
    says; a weight that is split is V; a batch is V, or R where all ranks have the same; a loss of own
    rows or places is a part of a sum; and the program's `Copy`, `Sum` and `Gather`, which communicate,
    have the hooks of such functions. Where nothing is declared, nothing is checked.
    """
    return pool.run(_refused, program, right, whole)[0]


def _refused(program: Program, right: bool, whole: str) -> tuple[str, str]:
    import spmd_types
    import spmd_types.checker

    join()
    case = program.case(right=right)
    strategy: Strategy = case["parallel"]
    model = built(case, None)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    model, _ = strategy.prepare(model, lambda made: make_optimizer(case, made))
    strategy.seed(0)
    share = strategy.share(case["batches"][0])
    if any(is_dtensor(parameter) for parameter in model.parameters()):
        strategy.close()
        return "", "it takes no DTensors"  # assert_type says so
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ranks",))
    axis = mesh.get_group("ranks")
    has_own_rows = strategy.data == "rows"

    def declare() -> None:
        _declare_functions(program, axis)
        for name, parameter in model.named_parameters():
            kind = spmd_types.R if has_own_rows else getattr(spmd_types, whole)
            if shapes.get(strategy.plain_name(name)) != parameter.shape:
                kind = spmd_types.V
            spmd_types.assert_type(parameter, {axis: kind})
        for tensor in [share, *(share.values() if isinstance(share, Mapping) else ())]:
            if isinstance(tensor, torch.Tensor):
                spmd_types.assert_type(tensor, {axis: spmd_types.V if has_own_rows else spmd_types.R})

    calls = []

    def step(module: nn.Module, part: Any) -> Any:
        calls.append(part)
        with spmd_types.set_current_mesh(mesh), spmd_types.checker.typecheck("permissive"):
            declare()
            output = case["step"](module, part)
            loss = output["loss"] if isinstance(output, Mapping) else output
            kind = spmd_types.get_local_type(loss).get(axis) if spmd_types.has_local_type(loss) else None
            if kind is spmd_types.V:
                spmd_types.reinterpret(loss, axis, src=spmd_types.V, dst=spmd_types.P)
            return output

    try:
        strategy.backward(model, step, micro_batches(share, case.get("micro", 1)))
    except spmd_types.SpmdTypeError as error:
        return f"{_line_of(program, error)}{str(error).splitlines()[0]}", ""
    finally:
        strategy.close()
    return "", "" if calls else "the program calls the model without its step"


def _declare_functions(program: Program, axis: Any) -> None:
    """Give the functions of a program that communicate the hooks which the checker asks for."""
    from spmd_types import I, P, R, S, V, rules

    def copied(*, x: torch.Tensor) -> Any:
        return rules.convert(x, axis, src=I, dst=R)

    def summed(*, x: torch.Tensor) -> Any:
        return rules.all_reduce(rules.reinterpret(x, axis, src=V, dst=P), axis, src=P, dst=I)

    def gathered(*, x: torch.Tensor) -> Any:
        return rules.all_gather(x, axis, src=S(x.ndim - 1), dst=I)

    for name, hook in zip(FUNCTIONS, (copied, summed, gathered), strict=True):
        function = getattr(program.module, name, None)
        if function is not None:
            function.spmd_typecheck = staticmethod(hook)


def _line_of(program: Program, error: Exception) -> str:
    """Return the line of a program at which an error was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == str(program.file)]
    return f"line {lines[-1]}: " if lines else ""
