"""`verify`: the reference on one process, the strategy on real ranks, and the comparison."""

import inspect
import math
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from tp_core.arguments import explain_arguments
from tp_core.compare import coarsest, idle_lines_in_words, joined_parts, named_tensors
from tp_core.data import Parts
from tp_core.errors import ConfigError, ModelError, RankFailedError, TpError
from tp_core.random import preserve_rng_state
from tp_core.ranks import RankPool

from tp_verify._after import (
    compare_draws,
    compare_generated,
    compare_generators,
    compare_loaded,
    compare_masks,
    compare_next_rates,
)
from tp_verify._compare import RunComparison
from tp_verify._own_batches import OwnBatches, own_batches
from tp_verify._report import Finding, VerifyReport
from tp_verify._reproduce import Case, check_reproducible, is_shown, script, smallest
from tp_verify._rounding import bound_of_sums, farthest, rounded_runs
from tp_verify._strategy import Step, Strategy, check_strategy, row_count
from tp_verify._training_task import (
    Followed,
    Loaded,
    OneDevice,
    RunRecord,
    TrainingTask,
    build_model,
    draw_task,
    groups_below,
    least_epsilon,
    load_task,
    make_with_epsilon,
    one_thread,
    run_task,
)

Parallel = Strategy | Callable[[nn.Module], nn.Module | None]


def default_optimizer(model: nn.Module) -> Optimizer:
    """Return AdamW over all trained parameters."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)


@explain_arguments("verify(build, batches, parallel=parallel, step=step)")
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
    generate: Step | None = None,
    reload_on: int | RankPool | None = None,
    dropout: int = 0,
    vary: bool = True,
    reproduce: str | Path | None = None,
    timeout_s: float = 300.0,
) -> VerifyReport:
    """Train on one device and in parallel, and compare everything: the report names the first difference.

    Compared are, for each batch, the outputs of all modules, the loss, all gradients, the norm and clipped
    gradients, the weights, the optimizer's state and the buffers; then an evaluation. Dropout is left out of
    these. Batches that this function makes follow yours. Ask for more: what the model generates, a checkpoint
    on another number of ranks, and dropout.

    Args:
        build: A function without arguments that returns the plain model, the same each time.
        batches: Whole batches, one for each optimizer step: tensors, nested as you like.
        parallel: A :class:`Strategy`, or a function from the plain model to the parallel one.
        step: ``step(model, batch)`` returns the loss, or a dict with "loss" and the "weight" that it is a
            mean over. It runs on the plain model and on the parallel one.
        optimizer: A function from a model to its optimizer.
        ranks: The number of processes, or a pool of them (`tp_core.ranks.RankPool`) that is used again.
        micro: The micro-batches into which each rank cuts its share of a batch.
        max_norm: The global norm to which gradients are clipped; by default they are not.
        dtype: The type in which the ranks compute; ``None`` for the model's own. The reference is in float64,
            and bounds are one device's in that type. An optimizer's epsilon that the type cannot add is
            raised to the least that it can.
        generate: ``generate(model, batch)`` returns what has to be equal element by element: tokens, say. It
            runs after the training, on the first batch.
        reload_on: The number of processes that load the checkpoint of the trained model, or a pool of them.
            Weights, states and buffers have to be equal bit by bit. Where as many load, ranks continue with
            their own random numbers, or the checkpoint has none, and with the learning rates of ranks that
            did not stop.
        dropout: The number of seeds with which the loss is drawn with dropout: its mean and variance are
            compared, whether ranks draw the same masks, and whether what is computed again has the masks of
            the forward pass. 100 show what is worth a training.
        vary: Whether batches of the kind of the first follow, one or more, for three steps in all: with other
            values of tokens and numbers, another length and padding, as far as the plain model takes them,
            and the ranks. Set it to ``False`` where only your own batches are right.
        reproduce: A file for a script of torch alone, with the fewest ranks, rows, places and layers that
            still part in the first forward and backward pass; it is written where they part there.
        timeout_s: The deadline of the ranks.

    Raises:
        ConfigError: There are no batches, or one has too few rows; or a script cannot say what it needs.
        ModelError: The builder is not repeatable, or the loss is random without dropout.
        RankFailedError: A rank raised, died or outlived the deadline.

    Example:
        >>> from torch.nn.parallel import DistributedDataParallel
        >>> verify(build, batches, parallel=DistributedDataParallel, step=step)  # doctest: +SKIP
    """
    began = time.perf_counter()
    if not isinstance(parallel, Strategy) and not callable(parallel):
        msg = f"parallel is a function of the model, or a Strategy as strategies.DDP(), got {parallel!r}"
        raise ConfigError(msg)
    if isinstance(parallel, Strategy):
        strategy = parallel
    else:
        strategy = Strategy(parallel)
    count = _count_of(ranks)
    task = TrainingTask(
        build, batches, step, optimizer, micro, max_norm, dtype, generate=generate, seeds=dropout
    )
    check_strategy(strategy)
    _check(task, strategy, count)
    if dtype is not None:  # which the user's optimizer was not made for
        task = replace(task, make_optimizer=partial(make_with_epsilon, optimizer, least_epsilon(dtype)))
    if reproduce is not None:
        check_reproducible(build, step, batches, strategy)
    with one_thread(), preserve_rng_state():
        own = OwnBatches()
        try:
            if vary:
                own = own_batches(task)
            runs = _trained(task, own.choices(len(batches)), strategy, ranks, reload_on, timeout_s)
        except Exception as error:
            if not isinstance(error, TpError):
                error.add_note(
                    f"the step raised it on one device, with the first of {len(batches)} batches, a "
                    f"{type(batches[0]).__name__}: {_shapes(batches[0])}; batches is a list of whole "
                    "ones, as batches=[(inputs, targets)]"
                )
            raise
        task = replace(runs.task, seeds=0)
        kept = task.dtype or next((p.dtype for p in build_model(task).parameters()), torch.float32)
        # The reference in float64, and one with the roundings of the type in which the ranks compute.
        exact = runs.exact
        near = exact
        computed = coarsest([kept, *exact.dtypes])
        if computed != torch.float64:
            # Each step begins with the ranks' weights and updates with their gradients: by rounding alone
            # two trainings in a low precision part, as Adam divides by what may be all but zero.
            follower = replace(task, micro=1, follow=_followed(exact, runs.records, task))
            exact = run_task(replace(follower, dtype=torch.float64), OneDevice())
            near = farthest(exact, rounded_runs(follower, kept, computed))
        drawn = runs.exact
        if computed != torch.float64 and runs.task.seeds:
            # Of the ranks' last weights, for the same reason.
            drawing = replace(runs.task, dtype=torch.float64, micro=1)
            drawn = draw_task(drawing, _last(runs, "weights"), _last(runs, "buffers"))
    # Of the follower too: under autocast, float64 stays float64, and float32 does not.
    bound = bound_of_sums([kept, *exact.dtypes, *near.dtypes], count * micro)
    unknown = {}
    if runs.not_evaluated:
        unknown["evaluation"] = f"{runs.not_evaluated}; override evaluate()"
    comparison = RunComparison(exact, near, runs.records, bound, {}, dict(unknown), strategy.reorders)
    finding = comparison.first()
    if finding is not None and finding.what in _UPDATED and computed == torch.float64:
        # A gradient that is rounding alone, as of a bias before a norm layer: Adam makes a step of it, on
        # ranks another one. The gradients were the same, so the update has to be that of the ranks' own.
        follower = replace(task, dtype=torch.float64, micro=1, follow=_followed(exact, runs.records, task))
        with one_thread(), preserve_rng_state():
            exact = near = run_task(follower, OneDevice())
        comparison = RunComparison(exact, near, runs.records, bound, {}, dict(unknown), strategy.reorders)
        finding = comparison.first()
    finding = (
        finding
        or compare_generated(comparison)
        or compare_loaded(comparison, [one.state for one in runs.loaded])
        or compare_generators(comparison, [one.generators for one in runs.loaded])
        or compare_next_rates(comparison, runs.loaded)
        or compare_masks(comparison, drawn)
        or compare_draws(comparison, drawn.draws)
    )
    reproduction = ""
    if finding is not None and reproduce is not None:
        reproduction = _reproduce(task, strategy, ranks, finding, timeout_s, Path(reproduce))
    proven = []
    if finding is None:
        proven = _proven(task, exact, comparison, runs, own)
    not_covered = _not_covered(task, exact, comparison)
    if dtype is not None and groups_below(optimizer(build_model(task)), least_epsilon(dtype)):
        not_covered.append(f"the optimizer's own epsilon: here it is {least_epsilon(dtype):.2g}, the least")
    if runs.refused:
        not_covered.append(runs.refused)
    elif vary and not task.own:
        not_covered.append(_UNKNOWN)
    return VerifyReport(
        name=strategy.name,
        ranks=count,
        dtype=str(kept).removeprefix("torch."),
        finding=finding,
        compared=comparison.compared,
        proven=proven,
        not_covered=not_covered,
        seconds=time.perf_counter() - began,
        reproduction=reproduction,
    )


def _reproduce(
    task: TrainingTask,
    strategy: Strategy,
    ranks: int | RankPool,
    finding: Finding,
    timeout_s: float,
    file: Path,
) -> str:
    """Write the script of the smallest case that parts as the finding does; return how to run it."""
    if not is_shown(finding, strategy):
        return "no script: it shows the outputs, losses and gradients of the first step"
    latest = finding

    def parts(case: Case) -> bool:
        nonlocal latest
        pool: int | RankPool = case.ranks
        if isinstance(ranks, RankPool) and ranks.processes == case.ranks:
            pool = ranks
        options: dict[str, Any] = {"ranks": pool, "dtype": task.dtype, "timeout_s": timeout_s, "vary": False}
        try:
            report = verify(case, [case.batch], parallel=strategy, step=task.step, **options)
        except Exception:  # noqa: BLE001 - what does not run when it is smaller does not part there
            return False
        if report.finding is None or report.finding.what != finding.what:
            return False
        latest = report.finding
        return True

    case = smallest(Case(task.build, task.batches[0], _count_of(ranks)), strategy, parts)
    file.write_text(script(case, task.step, strategy, latest, task.dtype), encoding="utf-8")
    return f"torchrun --nproc-per-node {case.ranks} {file}"


@dataclass(frozen=True, slots=True)
class _Runs:
    """What one device and the ranks have trained, and what ranks have loaded.

    Attributes:
        task: The task, with the batches that the ranks took.
        exact: The record of one device in float64.
        records: Those of the ranks.
        loaded: What they loaded, and the states of their generators.
        refused: A batch that the ranks did not take, and why; may be empty.
        not_evaluated: Why there is no evaluation; may be empty.
    """

    task: TrainingTask
    exact: RunRecord
    records: list[RunRecord]
    loaded: list[Loaded]
    refused: str = ""
    not_evaluated: str = ""


def _last(runs: _Runs, kind: str) -> dict[str, Tensor]:
    """Return the whole tensors of a kind that ranks have at the end of the training."""
    whole = getattr(runs.exact.steps[-1], kind)
    return joined_parts(whole, [getattr(one.steps[-1], kind) for one in runs.records])


_UPDATED = ("the change of the weight", "the optimizer's state")
_EVALUATING = ", in _evaluate_batches\n"  # of a traceback; ranks send no more of an error than its text
_UNKNOWN = "batches of its own: the plain model takes none of those that are made from your first one"


def _trained(
    task: TrainingTask,
    choices: Sequence[Sequence[Any]],
    strategy: Strategy,
    ranks: int | RankPool,
    reload_on: int | RankPool | None,
    timeout_s: float,
) -> _Runs:
    """Train on the user's batches and the first choice of others, or the next where ranks refuse those."""
    made, *fewer = choices
    tried = replace(task, batches=[*task.batches, *made], own=len(made))
    exact = run_task(replace(tried, dtype=torch.float64, micro=1), OneDevice())
    _check_losses(tried, exact)
    began = time.monotonic()
    try:
        return _on_ranks(tried, exact, strategy, ranks, reload_on, timeout_s)
    except RankFailedError as error:
        if task.evaluates and _EVALUATING in str(error):
            # The training may be wrong all the same, or right.
            trained = replace(task, evaluates=False)
            runs = _trained(trained, choices, strategy, ranks, reload_on, timeout_s)
            return replace(runs, not_evaluated=f"ranks {_reason(error)}")
        if not fewer:
            raise
        if isinstance(ranks, int):
            limit = timeout_s
        else:
            limit = ranks.timeout_s
        if time.monotonic() - began > limit:
            # Ranks waited until the deadline. If they do so on the user's batches, too, it is said next.
            fewer = fewer[-1:]
        reason = _reason(error)
    runs = _trained(task, fewer, strategy, ranks, reload_on, timeout_s)
    return replace(runs, refused=f"a batch of its own, {_shapes(made[0])}: ranks {reason}")


def _reason(error: RankFailedError) -> str:
    """Return in words what ranks do: raise, or not end."""
    said = str(error).strip().splitlines()
    if said[0].endswith("at the deadline"):  # stacks follow
        return "do not end"
    return f"raise {said[-1]}"


def _on_ranks(
    task: TrainingTask,
    exact: RunRecord,
    strategy: Strategy,
    ranks: int | RankPool,
    reload_on: int | RankPool | None,
    timeout_s: float,
) -> _Runs:
    if reload_on is None:
        return _Runs(task, exact, _on_pool(ranks, timeout_s, run_task, task, strategy), [])
    with tempfile.TemporaryDirectory(prefix="tp-verify-") as folder:
        saving = replace(task, folder=folder, continues=_count_of(ranks) == _count_of(reload_on))
        records = _on_pool(ranks, timeout_s, run_task, saving, strategy)
        try:
            loaded = _on_pool(reload_on, timeout_s, load_task, saving, strategy)
        except RankFailedError:
            if not saving.continues:
                raise
            # Perhaps they cannot train on: what they have loaded is compared all the same.
            only_loading = replace(saving, continues=False)
            loaded = _on_pool(reload_on, timeout_s, load_task, only_loading, strategy)
        return _Runs(task, exact, records, loaded)


_FUNCTIONS = {
    "step": "step=lambda model, batch: loss_of(model(batch))",
    "optimizer": "optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1)",
}
"""What to write in place of something that is no function."""


def _count_of(ranks: int | RankPool) -> int:
    if isinstance(ranks, int):
        return ranks
    if not isinstance(ranks, RankPool):
        msg = f"ranks must be a number of processes, or a pool of them, got {ranks!r:.80}"
        raise ConfigError(msg)
    return ranks.processes


def _on_pool(ranks: int | RankPool, timeout_s: float, function: Callable[..., Any], *args: Any) -> list[Any]:
    if not isinstance(ranks, int):
        return ranks.run(_in_group, function, *args)
    with RankPool(ranks, timeout_s=timeout_s) as pool:
        return pool.run(_in_group, function, *args)


def _in_group(function: Callable[..., Any], *args: Any) -> Any:
    """Run a function on a rank, in a process group that stays for the pool's next verification."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    # FSDP2 warns of gradients that an operation in place could lose: here gradients are compared.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    return function(*args)


def _check(task: TrainingTask, strategy: Strategy, count: int) -> None:
    if isinstance(task.build, nn.Module):
        msg = f"build is a function that returns the plain model, got a model, {type(task.build).__name__}"
        raise ConfigError(msg)
    if inspect.isclass(task.build) or inspect.isfunction(task.build):
        try:
            inspect.signature(task.build).bind()
        except TypeError as error:
            name = task.build.__name__
            msg = f"build is a function without arguments, and {name}() is {error}; write lambda: {name}(...)"
            raise ConfigError(msg) from None
    for what, function in (("step", task.step), ("optimizer", task.make_optimizer)):
        if not callable(function):
            got = " ".join(repr(function).split())
            msg = f"{what} is a function, got {got:.60}; write {_FUNCTIONS[what]}"
            raise ConfigError(msg)
    if task.max_norm is not None and not task.max_norm > 0:
        msg = f"max_norm is a number above 0, or None for no clipping, got {task.max_norm!r}"
        raise ConfigError(msg)
    is_kind = isinstance(task.dtype, torch.dtype) and task.dtype.is_floating_point
    if task.dtype is not None and not is_kind:
        msg = f"dtype is one of torch's, as torch.bfloat16, or None for the model's own, got {task.dtype!r}"
        raise ConfigError(msg)
    if not isinstance(task.batches, Sequence) or isinstance(task.batches, str):
        msg = f"batches is a list of whole batches, one for each step, got {type(task.batches).__name__}"
        raise ConfigError(msg)
    if not task.batches:
        msg = "there is nothing to verify with: give at least one batch, as a list"
        raise ConfigError(msg)
    for batch in task.batches:
        if next(named_tensors(batch), None) is None:
            msg = f"a batch has tensors, nested as you like, got {type(batch).__name__} without one"
            raise ConfigError(msg)
        if _has_parts(batch):
            msg = (
                "a batch is in parts, one for each device, as tp_tuple's collate functions return them, and "
                "whole batches are compared here: give the loader its own collate_fn; the backend cuts them"
            )
            raise ConfigError(msg)
    for what, number, least in (("ranks", count, 1), ("micro", task.micro, 1), ("dropout", task.seeds, 0)):
        if not isinstance(number, int) or number < least:
            msg = f"{what} is a number of {least} or more, got {number!r}"
            raise ConfigError(msg)
    needed = task.micro
    if strategy.data == "rows":
        needed *= count
    rows = min(map(row_count, task.batches))
    if rows < needed:
        msg = (
            f"a batch has {rows} rows, and {count} ranks with {task.micro} micro-batches need {needed}: give "
            "larger batches, or fewer ranks"
        )
        raise ConfigError(msg)
    with preserve_rng_state():
        first, second = build_model(task), build_model(task)
        made = task.make_optimizer(second)
    if not isinstance(made, Optimizer):
        msg = f"optimizer is a function that returns an optimizer of torch, and returned {made!r:.60}"
        raise ConfigError(msg)
    for (name, one), other in zip(first.named_parameters(), second.parameters(), strict=True):
        if one.shape != other.shape or not torch.equal(one, other):
            msg = (
                f"the builder is not repeatable: {name!r} differs between two calls after the same "
                "torch.manual_seed; draw all values with torch, without a generator of your own"
            )
            raise ModelError(msg)


def _has_parts(batch: Any) -> bool:
    if isinstance(batch, Parts):
        return True
    if isinstance(batch, Mapping):
        return any(map(_has_parts, batch.values()))
    return isinstance(batch, tuple | list) and any(map(_has_parts, batch))


def _followed(exact: RunRecord, records: Sequence[RunRecord], task: TrainingTask) -> list[Followed]:
    """Return the ranks' weights before each step, and the gradients that they updated with."""
    followed = []
    before = [record.initial for record in records]
    for number in range(len(task.batches)):
        steps = [record.steps[number] for record in records]
        grads = [step.gradients for step in steps]
        if task.max_norm is not None:
            grads = [step.clipped for step in steps]
        weights = joined_parts(exact.initial, before)
        followed.append(Followed(weights, joined_parts(exact.initial, grads)))
        before = [step.weights for step in steps]
    return followed


def _check_losses(task: TrainingTask, exact: RunRecord) -> None:
    """Check that the first loss is a number, and the same for another seed, once dropout is left out.

    Raises:
        ModelError: It does not.
    """
    one = replace(task, dtype=torch.float64, micro=1, batches=task.batches[:1], own=0, generate=None)
    again = run_task(one, OneDevice(), seed=1).steps[0].loss
    if not math.isfinite(exact.steps[0].loss or 0.0):
        msg = f"the loss on one device is {exact.steps[0].loss}: nothing can be compared with it"
        raise ModelError(msg)
    if again != exact.steps[0].loss:
        msg = (
            f"the loss is random without dropout: {exact.steps[0].loss:.6g} and {again:.6g} after two seeds; "
            "draw nothing in the step and the forward, or draw it into the batches"
        )
        raise ModelError(msg)


def _proven(
    task: TrainingTask, exact: RunRecord, comparison: RunComparison, runs: _Runs, own: OwnBatches
) -> list[str]:
    users = task.batches[: len(task.batches) - task.own]
    lines = [f"{_steps(users)} of {', '.join(dict.fromkeys(map(_shapes, users)))}"]
    if task.own:
        made = task.batches[len(users) :]
        shapes = ", ".join(dict.fromkeys(map(_shapes, made)))
        lines.append(f"{_steps(made)} of its own, {shapes}, with {' and '.join(own.varied)}")
    if "evaluation" in comparison.unknown:
        evaluated = ""
    else:
        evaluated = " and evaluation"
    lines.append(f"training{evaluated}, without dropout")
    if task.micro > 1:
        lines.append(f"{task.micro} micro-batches for each step")
    if task.max_norm is not None:
        norms = [one.norm for one in exact.steps if one.norm is not None]
        clipped = sum(norm > task.max_norm for norm in norms)
        lines.append(f"gradients clipped to {task.max_norm:g}, which {clipped} of {len(norms)} steps were")
    if comparison.compared.get("generated tensors"):
        lines.append("what is generated from the first batch")
    if runs.loaded:
        plural = "s" if len(runs.loaded) > 1 else ""
        if "states of random numbers" in comparison.compared:
            numbers = ", with its random numbers"
        else:
            numbers = ""
        lines.append(f"a checkpoint that {len(runs.loaded)} rank{plural} loaded{numbers}")
    if comparison.compared.get("seeds of dropout"):
        lines.append(f"dropout, in distribution over {comparison.compared['seeds of dropout']} seeds")
    return lines


def _steps(batches: Sequence[Any]) -> str:
    return f"{len(batches)} optimizer step{'s' * (len(batches) > 1)} on batches"


def _shapes(batch: Any) -> str:
    return " and ".join(f"{place or 'one tensor'} {tuple(t.shape)}" for place, t in named_tensors(batch))


def _not_covered(task: TrainingTask, exact: RunRecord, comparison: RunComparison) -> list[str]:
    with preserve_rng_state():
        model = build_model(task)
    reached = {place.module for one in exact.steps for place in one.forward}
    lines = []
    leaves = [n for n, m in model.named_modules() if n and not list(m.children()) and n not in reached]
    if leaves:
        lines.append(f"modules that no batch reached: {', '.join(leaves)}")
    frozen = [n for n, p in model.named_parameters() if not p.requires_grad]
    without = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and all(_is_zero(one.gradients.get(name)) for one in exact.steps):
            without.append(name)
    if exact.idle_lines:
        lines.append(f"lines that did not run: {idle_lines_in_words(exact.idle_lines)}")
    if without:
        lines.append(f"parameters that got no gradient: {', '.join(without)}")
    if frozen:
        lines.append(f"{len(frozen)} frozen parameters, which nothing changes")
    lines += [f"{place}: {reason}" for place, reason in comparison.unknown.items()]
    return lines


def _is_zero(tensor: Tensor | None) -> bool:
    return tensor is None or not bool(tensor.any())
