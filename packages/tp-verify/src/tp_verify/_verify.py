"""`verify`: the reference on one process, the way on real ranks, and the comparison."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from tp_core.errors import ConfigError, ModelError
from tp_core.internal import RankPool

from tp_verify._compare import Bound, Comparison
from tp_verify._report import Report
from tp_verify._run import Followed, OneDevice, RunRecord, Task, build_model, one_thread, run_task
from tp_verify._way import Step, Way, row_count

Parallel = Way | Callable[[nn.Module], nn.Module | None]


def default_optimizer(model: nn.Module) -> Optimizer:
    """Return AdamW over all trained parameters."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)


def verify(
    build: Callable[[], nn.Module],
    batches: Sequence[Any],
    *,
    parallel: Parallel,
    step: Step,
    optimizer: Callable[[nn.Module], Optimizer] = default_optimizer,
    ranks: int | RankPool = 2,
    micro: int = 1,
    max_norm: float | None = None,
    dtype: torch.dtype | None = torch.float64,
    timeout_s: float = 300.0,
) -> Report:
    """Train on one device and in parallel, and compare everything: the report names the first difference.

    Compared are, for each batch, the outputs of all modules, the loss, all gradients, the norm and clipped
    gradients, the weights, the optimizer's state and the buffers; then an evaluation. Dropout is left out of
    these, and compared in its distribution afterwards.

    Args:
        build: A function without arguments that returns the plain model, the same each time.
        batches: Whole batches, one for each optimizer step: tensors, nested as you like.
        parallel: A :class:`Way`, or a function from the plain model to the parallel one.
        step: ``step(model, batch)`` returns the loss, or a dict with "loss" and the "weight" that it is a
            mean over. It runs on the plain model and on the parallel one.
        optimizer: A function from a model to its optimizer.
        ranks: The number of processes, or a pool of them (`tp_core.testing.RankPool`) that is used again.
        micro: The micro-batches into which each rank cuts its share of a batch.
        max_norm: The global norm to which gradients are clipped; by default they are not.
        dtype: The type in which the ranks compute; ``None`` for the model's own. The reference is in float64,
            and bounds are one device's in that type.
        timeout_s: The deadline of the ranks.

    Raises:
        ConfigError: There are no batches, or one has too few rows.
        ModelError: The builder is not repeatable, or the loss is random without dropout.
        RankFailedError: A rank raised, died or outlived the deadline.

    Example:
        >>> from torch.nn.parallel import DistributedDataParallel
        >>> verify(build, batches, parallel=DistributedDataParallel, step=step)  # doctest: +SKIP
    """
    began = time.perf_counter()
    way = parallel if isinstance(parallel, Way) else Way(parallel)
    count = ranks if isinstance(ranks, int) else ranks.processes
    task = Task(build, batches, step, optimizer, micro, max_norm, dtype)
    _check(task, way, count)
    with one_thread(), torch.random.fork_rng(devices=[]):
        exact = run_task(replace(task, dtype=torch.float64, micro=1), OneDevice())
        own = task.dtype or next((p.dtype for p in build_model(task).parameters()), torch.float32)
        near = exact
        _check_losses(task, exact)
        records = _on_ranks(task, way, ranks, timeout_s)
        if _coarsest(own, exact) != torch.float64:
            # Each step begins with the ranks' weights and updates with their gradients: by rounding alone
            # two trainings in a low precision part, as Adam divides by what may be all but zero.
            task = replace(task, micro=1, follow=_followed(exact, records, task))
            exact = run_task(replace(task, dtype=torch.float64), OneDevice())
            near = run_task(task, OneDevice())
    comparison = Comparison(exact, near, records, Bound.of(_coarsest(own, exact)), {}, {}, way.reorders)
    finding = comparison.first()
    return Report(
        name=way.name,
        ranks=count,
        dtype=str(own).removeprefix("torch."),
        finding=finding,
        compared=comparison.compared,
        proven=_proven(task, exact) if finding is None else [],
        not_covered=_not_covered(task, exact, comparison),
        seconds=time.perf_counter() - began,
    )


def join(backend: str = "gloo") -> None:
    """Join the process group of a verification: the setup of a pool of ranks."""
    dist.init_process_group(backend)


def _on_ranks(task: Task, way: Way, ranks: int | RankPool, timeout_s: float) -> list[RunRecord]:
    if not isinstance(ranks, int):
        return ranks.run(run_task, task, way)
    with RankPool(ranks, setup=join, timeout_s=timeout_s) as pool:
        return pool.run(run_task, task, way)


def _check(task: Task, way: Way, count: int) -> None:
    if not task.batches:
        msg = "there is nothing to verify with: give at least one batch, as a list"
        raise ConfigError(msg)
    needed = task.micro * (count if way.data == "rows" else 1)
    rows = min(map(row_count, task.batches))
    if rows < needed:
        msg = (
            f"a batch has {rows} rows, and {count} ranks with {task.micro} micro-batches need {needed}: give "
            "larger batches, or fewer ranks"
        )
        raise ConfigError(msg)
    with torch.random.fork_rng(devices=[]):
        first, second = build_model(task), build_model(task)
    for (name, one), other in zip(first.named_parameters(), second.parameters(), strict=True):
        if one.shape != other.shape or not torch.equal(one, other):
            msg = (
                f"the builder is not repeatable: {name!r} differs between two calls after the same "
                "torch.manual_seed; draw all values with torch, without a generator of your own"
            )
            raise ModelError(msg)


def _followed(exact: RunRecord, records: Sequence[RunRecord], task: Task) -> list[Followed]:
    """Return the ranks' weights before each step, and the gradients that they updated with."""
    found = []
    for number in range(len(task.batches)):
        before = [r.steps[number - 1].weights if number else r.initial for r in records]
        steps = [r.steps[number] for r in records]
        after = [one.gradients if task.max_norm is None else one.clipped for one in steps]
        found.append(Followed(_joined(exact.initial, before), _joined(exact.initial, after)))
    return found


def _joined(like: Mapping[str, Tensor], ranks: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """Return whole tensors of those that ranks have whole, or in slices along one dimension."""
    whole = {}
    for name, tensor in like.items():
        parts = [one[name] for one in ranks if one.get(name) is not None]
        if parts and parts[0].shape == tensor.shape:
            whole[name] = parts[0]
        elif parts and parts[0].dim() == tensor.dim():
            dims = [d for d in range(tensor.dim()) if parts[0].size(d) != tensor.size(d)]
            joined = torch.cat(parts, dims[0])
            if joined.shape == tensor.shape:
                whole[name] = joined
    return whole


def _check_losses(task: Task, exact: RunRecord) -> None:
    """Check that another seed gives the same first loss, once dropout is left out.

    Raises:
        ModelError: It does not.
    """
    one = replace(task, dtype=torch.float64, micro=1, batches=task.batches[:1])
    again = run_task(one, OneDevice(), seed=1).steps[0].loss
    if again != exact.steps[0].loss:
        msg = (
            f"the loss is random without dropout: {exact.steps[0].loss:.6g} and {again:.6g} after two seeds; "
            "draw nothing in the step and the forward, or draw it into the batches"
        )
        raise ModelError(msg)


def _proven(task: Task, exact: RunRecord) -> list[str]:
    steps = len(task.batches)
    lines = [
        f"{steps} optimizer step{'s' if steps > 1 else ''} on batches of "
        + ", ".join(dict.fromkeys(_shapes(batch) for batch in task.batches)),
        "training and evaluation, without dropout",
    ]
    if task.micro > 1:
        lines.append(f"{task.micro} micro-batches for each step")
    if task.max_norm is not None:
        norms = [one.norm for one in exact.steps if one.norm is not None]
        clipped = sum(norm > task.max_norm for norm in norms)
        lines.append(f"gradients clipped to {task.max_norm:g}, which {clipped} of {steps} steps were")
    return lines


def _shapes(batch: Any) -> str:
    from tp_verify._way import tensors_in

    return " and ".join(f"{place or 'one tensor'} {tuple(t.shape)}" for place, t in tensors_in(batch))


def _not_covered(task: Task, exact: RunRecord, comparison: Comparison) -> list[str]:
    with torch.random.fork_rng(devices=[]):
        model = build_model(task)
    reached = {place.module for one in exact.steps for place in one.forward}
    lines = []
    leaves = [n for n, m in model.named_modules() if n and not list(m.children()) and n not in reached]
    if leaves:
        lines.append(f"modules that no batch reached: {', '.join(leaves)}")
    frozen = [n for n, p in model.named_parameters() if not p.requires_grad]
    without = [
        n
        for n, p in model.named_parameters()
        if p.requires_grad and all(_is_zero(one.gradients.get(n)) for one in exact.steps)
    ]
    if without:
        lines.append(f"parameters that got no gradient: {', '.join(without)}")
    if frozen:
        lines.append(f"{len(frozen)} frozen parameters, which nothing changes")
    lines += [f"{place}: {reason}" for place, reason in comparison.unknown.items()]
    return lines


def _coarsest(own: torch.dtype, exact: RunRecord) -> torch.dtype:
    """Return the type that bounds are for: models of transformers compute losses in float32."""
    types = [own, *(one.loss_type for one in exact.steps if one.loss_type is not None)]
    return max(types, key=lambda dtype: torch.finfo(dtype).eps)


def _is_zero(tensor: Tensor | None) -> bool:
    return tensor is None or not bool(tensor.any())
