"""Tools for training loops over shards: clipping, loss scaling, parameter groups, sparse updates."""

import functools
import math
import zlib
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from tp_core.arguments import explain_arguments
from tp_core.compare import Bound
from tp_core.device_types import EXAMPLE, wide_float
from tp_core.errors import ConfigError, DisagreementError, NonFiniteLossError
from tp_core.state import hook_steps
from tp_core.tensors import copy_attributes, norm_dtype

from tp_shard._groups import _debug
from tp_shard._groups._group import Group, GroupLike, as_group
from tp_shard._groups._random import get_state
from tp_shard._shards import (
    ParallelLayer,
    get_split,
    holds_shard,
    local,
    part_of,
    parts_of_whole,
    sharded_over,
)

# -- Clipping by the norm of the whole gradient ---------------------------------------------------


Axes = tuple[dist.ProcessGroup, ...]
"""The groups over which a gradient is split."""


@explain_arguments("clip_grad_norm_(parameters, 1.0)")
@torch.no_grad()
def clip_grad_norm_(
    parameters: nn.Module | Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    group: GroupLike = None,
) -> Tensor:
    """Scale gradients in place so that the norm of the whole gradient is at most ``max_norm``.

    Shards of all ranks count, and parameters that all ranks have count once. The result equals
    ``torch.nn.utils.clip_grad_norm_`` on the unsharded model, and is the same on all ranks. Gradients may
    also be sharded over copies of the model, as by ``fully_shard``.

    Args:
        parameters: A model, or parameters; on every rank those of the same layers.
        max_norm: The largest norm that is not scaled.
        norm_type: The order of the norm; ``inf`` for the largest absolute value.
        error_if_nonfinite: Whether to raise if the norm is not finite.
        foreach: As torch takes it.
        group: The ranks; the current model-parallel group by default.

    Returns:
        The norm of the whole gradient before scaling, a scalar tensor, the same on all ranks.

    Raises:
        NonFiniteLossError: The norm is not finite, with ``error_if_nonfinite``; on every rank.
        ConfigError: A gradient is a DTensor with a partial placement.
        DisagreementError: In debug mode, as :func:`check_gradients` says.

    Collectives: an all-reduce of one number. Under ``fully_shard`` also one of two numbers for each axis of
    its mesh over which gradients are sharded.

    Example:
        >>> model = ts.nn.ParallelLinear(4, 4, dim=0)
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> bool(clip_grad_norm_(model, 1.0) > 1)
        True
    """
    if isinstance(max_norm, str) or not max_norm >= 0:
        msg = f"max_norm must be a number from 0, got {max_norm!r}"
        raise ConfigError(msg)
    if isinstance(parameters, nn.Module):
        if _debug.state.enabled:
            check_gradients(parameters, group=group)
        parameters = parameters.parameters()
    elif isinstance(parameters, Tensor):
        parameters = [parameters]
    parameters = list(parameters)
    norm = total_grad_norm(parameters, norm_type, foreach=foreach, group=group)
    if error_if_nonfinite and not math.isfinite(norm.item()):
        msg = f"the norm of order {norm_type} of the gradients is {norm.item()}, so they cannot be clipped"
        raise NonFiniteLossError(msg)
    nn.utils.clip_grads_with_norm_(parameters, max_norm, norm, foreach)
    return norm


@torch.no_grad()
def total_grad_norm(
    parameters: Iterable[Tensor], norm_type: float, *, foreach: bool | None = None, group: GroupLike = None
) -> Tensor:
    """Return the norm of the whole gradient, the same on all ranks.

    Arguments and collectives are as for :func:`clip_grad_norm_`.
    """
    parameters = list(parameters)
    ranks = as_group(group)
    tensor_axes: Axes = ()
    if ranks.process_group is not None and ranks.size > 1:
        tensor_axes = (ranks.process_group,)
    # By the groups over which the gradients are split. The two first keys always exist: a rank without such
    # gradients still takes part in the sums, or the others would wait for it.
    gradients: dict[Axes, list[Tensor]] = {(): [], tensor_axes: []}
    for parameter in parameters:
        grad = parameter.grad
        counted = parameter if grad is None else grad
        axes = sharded_over(counted)
        is_split = bool(tensor_axes) and holds_shard(parameter)
        if is_split:
            axes += tensor_axes
        own = gradients.setdefault(axes, [])
        if grad is None:
            continue
        if grad.is_sparse:  # its missing rows are 0
            grad = grad.coalesce().values()
        parts = [local(grad)]
        if is_split:
            parts = _parts_counted_here(parameter, grad, ranks)
        own.extend(part for part in parts if part.numel())
    # Of any parameter: NCCL takes no tensor of the CPU, from a rank without gradients either.
    device = torch.device("cpu")
    if parameters:
        device = local(parameters[0]).device
    norms = {}
    for axes, own in gradients.items():
        norms[axes] = nn.utils.get_total_norm(own, norm_type, foreach=foreach).to(device)
    return _norm_over_groups(norms, norm_type).to(norm_dtype(parameters))


def _norm_over_groups(norms: dict[Axes, Tensor], norm_type: float) -> Tensor:
    """Return the norm of all gradients, from this rank's norms by the groups over which they are split.

    Collectives: an all-reduce for each group.
    Ranks hold: partial -> replicated.
    """
    is_max = norm_type == math.inf
    op = dist.ReduceOp.MAX if is_max else dist.ReduceOp.SUM
    # In float64, where the device has it: powers of float32 norms overflow where the norm itself does not.
    powers = {axes: norm.to(wide_float(norm.device)) for axes, norm in norms.items()}
    if not is_max:
        powers = {axes: norm.pow(norm_type) for axes, norm in powers.items()}
    # All ranks have the groups in the same order: in different orders they would wait for each other.
    for group in dict.fromkeys(group for axes in norms for group in axes):
        split_over_it = [axes for axes in norms if group in axes]
        values = torch.stack([powers[axes] for axes in split_over_it])
        dist.all_reduce(values, op, group=group)
        powers.update(zip(split_over_it, values.unbind(), strict=True))
    stacked = torch.stack(list(powers.values()))
    if is_max:
        return stacked.max()
    return stacked.sum().pow(1 / norm_type)


def _parts_counted_here(parameter: Tensor, grad: Tensor, group: Group) -> list[Tensor]:
    """Return the parts of a shard's gradient that no earlier rank holds too: each counts once."""
    split = get_split(parameter, group)
    if split is None or split.is_even:
        return [local(grad)]
    return [part for _, part in parts_of_whole([part_of(grad)], split, group.rank, own=True)]


class GradScaler(torch.amp.GradScaler):
    """A ``torch.amp.GradScaler`` for shards: if gradients overflow on one rank, all ranks skip the step.

    A gradient overflows on the rank that holds the shard. With torch's scaler that rank alone would skip the
    step, and the parameters that all ranks have would diverge.

    Args:
        device: The type of the devices that compute, such as "cuda" or "cpu".
        group: The ranks; the current model-parallel group by default.
        **kwargs: Further arguments of torch's scaler, such as ``init_scale``.

    Collectives: an all-reduce of one number in each step.
    """

    def __init__(self, device: str = EXAMPLE, *, group: GroupLike = None, **kwargs: Any) -> None:
        super().__init__(device, **kwargs)
        self._group = as_group(group)

    # Private: torch's `step` and `unscale_` both call it, and no public method sees the flags of an overflow.
    # `a_scaler_leaves_the_step_out_on_all_ranks_or_on_none` notices its loss.
    def _unscale_grads_(
        # Ranks hold: varying -> replicated.
        self,
        optimizer: Optimizer,
        inv_scale: Tensor,
        found_inf: Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, Tensor]:
        flags: dict[torch.device, Tensor] = super()._unscale_grads_(
            optimizer, inv_scale, found_inf, allow_fp16
        )
        if self._group.size == 1:
            return flags
        # One all-reduce, whatever devices this rank's gradients are on, and also on a rank without gradients:
        # the others would wait for it.
        worst = found_inf.clone()
        for flag in flags.values():
            worst = torch.maximum(worst, flag.to(worst.device))
        dist.all_reduce(worst, dist.ReduceOp.MAX, group=self._group.handle)
        devices = list(flags) or [worst.device]
        return {device: worst.to(device) for device in devices}


# -- Comparison of the gradients of whole parameters between the ranks of a copy ------------------


_BLOCK = 1 << 17
"""The elements that are compared at a time: in float64 1 MiB, which shares a segment of an allocator."""


@torch.no_grad()
def check_gradients(model: nn.Module, *, group: GroupLike = None) -> None:
    """Raise unless the ranks of a model's copy have the same gradients of its whole parameters.

    Call it after a backward pass, on every rank. Parameters that are not split are the same on all ranks of a
    group, and stay the same if their gradients are. The gradients differ if such a parameter works on a
    rank's own features or heads and its gradient is not summed, or if the ranks read different samples. Then
    each rank trains another model.

    The backend ``shard`` calls it once, after the first backward pass, and in debug mode after each one. In
    debug mode :func:`clip_grad_norm_` of a model calls it too.

    Args:
        model: The model, which may be wrapped.
        group: The ranks of one copy; the current model-parallel group by default.

    Raises:
        DisagreementError: The gradients of a parameter differ; it is named, on every rank.

    Collectives: an all-gather of three numbers for each parameter that is not split; if they differ, one more
    of a checksum of the random generators.

    Example:
        >>> model = ts.nn.ParallelLinear(4, 4, dim=0)
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> check_gradients(model)
    """
    ranks = as_group(group)
    whole = _whole_parameters(model)
    if ranks.size == 1 or not whole:
        return
    fingerprints = torch.stack([_fingerprint(p) for _, p in whole])  # (parameters, 3)
    _fixed_numbers.cache_clear()  # memory of the device, which later steps have no use for
    gathered = gather_numbers(fingerprints, ranks)  # (ranks, parameters, 3)
    largest = gathered[:, :, 1].nan_to_num(0.0, 0.0, 0.0).max().item()
    # Autocast leaves no trace in a gradient: one in float32 may be that of a pass in bfloat16. It does not
    # touch float64, where norms of transformers are in float32. A missing sum is far above either.
    is_wide = all(parameter.dtype == torch.float64 for _, parameter in whole)
    coarsest = torch.float32 if is_wide else torch.bfloat16
    bound = Bound.of([coarsest])
    for index, (name, _) in enumerate(whole):
        by_rank = gathered[:, index].tolist()
        first = by_rank[0]
        for rank, other in enumerate(by_rank):
            if _is_same(first, other, bound, largest):
                continue
            have_same_state = _have_same_random_state(ranks, fingerprints.device)
            raise DisagreementError(_disagreement(name, rank, first, other, have_same_state))


def comparison_nbytes(model: nn.Module) -> int:
    """Return the bytes of `check_gradients`: a block of a gradient, its squares, and the fixed numbers."""
    largest = max((parameter.numel() for _, parameter in _whole_parameters(model)), default=0)
    return 3 * torch.float64.itemsize * min(_BLOCK, largest)


def _disagreement(name: str, rank: int, first: list[float], other: list[float], have_same_state: bool) -> str:
    words = []
    for has_grad, norm, _ in (first, other):
        gradient = f"norm {norm:.6g}" if has_grad else "none"
        words.append(gradient)
    message = (
        f"ranks 0 and {rank} of a copy have different gradients of {name} ({words[0]} and {words[1]}), "
        "though all of them hold the whole of it, and would train apart. "
    )
    if not have_same_state:
        return message + (
            "Their random numbers differ, so that they drop different elements of what all hold: give the "
            "ranks of a copy one seed with torch.manual_seed(), and let no rank draw more than the others"
        )
    return message + (
        "Its module works on one rank's features or heads: give it ts.Replicated() in the plan, or "
        "ts.distributed.copy() in a model of your own. Or what all hold gets a dropout of each rank's own, "
        "such as ts.nn.ParallelDropout. Or the ranks of a copy read different samples. ts.verify() names the "
        "module if it is the plan"
    )


def _have_same_random_state(group: Group, device: torch.device) -> bool:
    """Return whether the ranks' default generators, of the CPU and of a device, are in the same state.

    Collectives: an all-gather of a checksum for each generator.
    """
    checksums = []
    for place in sorted({torch.device("cpu"), device}, key=str):
        checksums.append(zlib.crc32(get_state(place, None).numpy().tobytes()))
    gathered = gather_numbers(torch.tensor(checksums, dtype=torch.float64, device=device), group)
    return bool((gathered == gathered[0]).all())


def _whole_parameters(model: nn.Module) -> list[tuple[str, Tensor]]:
    """List the trained parameters that are not split."""
    # By layers as well as by marks: other code may have replaced a layer's parameters by ones without marks.
    shards: set[int] = set()
    for module in model.modules():
        if isinstance(module, ParallelLayer):
            shards.update(id(p) for name, p in module._parameters.items() if name in module.splits)
    whole: list[tuple[str, Tensor]] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in shards and not holds_shard(parameter):
            whole.append((name, parameter))
    return whole


def _fingerprint(parameter: Tensor) -> Tensor:
    """Return whether there is a gradient (1 or 0), its norm, and its dot product with fixed numbers."""
    # The dot product finds gradients of the same norm with other elements, without sending them.
    grad = parameter.grad
    if grad is None:
        return torch.zeros(3, dtype=torch.float64, device=parameter.device)
    grad = local(grad)  # under `fully_shard`
    if grad.is_sparse:
        grad = grad.coalesce().values()
    if grad.is_complex():
        grad = torch.view_as_real(grad)
    fingerprint = torch.zeros(3, dtype=torch.float64, device=grad.device)
    fingerprint[0] = 1
    for block in grad.reshape(-1).split(_BLOCK):
        wide = block.double()
        # In this order three blocks are in memory at most, as `comparison_nbytes` says.
        fingerprint[2] += wide.dot(_fixed_numbers(grad.device, wide.numel()))
        fingerprint[1] += wide.square().sum()
    fingerprint[1].sqrt_()
    return fingerprint


# One entry: blocks of one size follow each other, and each size has as much memory as its block.
@functools.lru_cache(maxsize=1)
def _fixed_numbers(device: torch.device, size: int) -> Tensor:
    return torch.arange(size, dtype=torch.float64, device=device).cos_()


def _is_same(first: list[float], other: list[float], bound: Bound, largest: float) -> bool:
    if first[0] != other[0]:
        return False
    values = torch.tensor([first[1:], other[1:]], dtype=torch.float64)
    if not values.isfinite().all():
        return True  # a loss scaler or the check of the loss reports non-finite gradients
    allowed = bound.rtol * max(first[1], other[1]) + bound.atol * largest
    return bool((values[0] - values[1]).abs().max() <= allowed)


def gather_numbers(tensor: Tensor, group: Group) -> Tensor:
    """Return the tensors of all ranks of a group: (ranks, ...). Collective: an all-gather.

    Ranks hold: varying -> replicated.
    """
    gathered = [torch.empty_like(tensor) for _ in range(group.size)]
    dist.all_gather(gathered, tensor, group=group.handle)
    return torch.stack(gathered)  # (ranks, ...)


# -- Optimizers over shards: parameter groups, and updates of the rows of a sparse gradient -------


def parameter_groups(model: nn.Module, *, weight_decay: float | None = None) -> list[dict[str, Any]]:
    """Return a model's trained parameters in groups for an optimizer, the same on all ranks.

    Shards and parameters that all ranks have are in separate groups. A tied parameter appears once.

    Args:
        model: The model.
        weight_decay: Decay for matrices; vectors (biases, norms) then get none, in separate groups. ``None``
            leaves decay to the optimizer.

    Returns:
        Dicts with "params", "name" and "sharded", and with "weight_decay" if there is one. No group is empty.

    Example:
        >>> model = ts.nn.ParallelLinear(4, 4, dim=0)
        >>> [(g["name"], len(g["params"])) for g in parameter_groups(model, weight_decay=0.1)]
        [('replicated, decayed', 1), ('replicated', 1)]
    """
    if weight_decay is not None and (isinstance(weight_decay, str) or not weight_decay >= 0):
        msg = f"weight_decay must be a number from 0, or None for the optimizer's, got {weight_decay!r}"
        raise ConfigError(msg)
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for parameter in model.parameters():
        if parameter.requires_grad:
            decays = weight_decay is not None and parameter.dim() > 1
            groups.setdefault((holds_shard(parameter), decays), []).append(parameter)
    result = []
    for (sharded, decays), parameters in sorted(groups.items(), key=lambda item: item[0], reverse=True):
        name = "sharded" if sharded else "replicated"
        if decays:
            name = f"{name}, decayed"
        group: dict[str, Any] = {"params": parameters, "name": name, "sharded": sharded}
        if weight_decay is not None:
            group["weight_decay"] = weight_decay if decays else 0.0
        result.append(group)
    return result


def update_sampled_rows(optimizer: Optimizer) -> None:
    """Make an optimizer update only the rows of a sparse gradient, in the parameter and in its state.

    Most of torch's optimizers refuse sparse gradients, and SGD moves all rows by their momentum. After this
    call each step passes those rows to the optimizer, in a small parameter with its part of the state, and
    writes them back. The other rows keep their values, momentum and moments, and get no weight decay. Partial
    FC (arXiv:2010.05222) updates sampled centers like this, and so does :class:`torch.optim.SparseAdam` for
    Adam. Parameters with dense gradients are updated as usual.

    Args:
        optimizer: An element-wise optimizer: SGD, Adam, AdamW, Adagrad, RMSprop, ... State that all elements
            share, such as the number of steps, counts every step.

    Raises:
        ConfigError: The optimizer is SparseAdam, which already does so. Or a step with sparse gradients gets
            a closure.

    Example:
        >>> head = ts.nn.MarginCrossEntropy(16, 1000, sample_rate=0.1, sparse=True)
        >>> optimizer = torch.optim.SGD(head.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
        >>> update_sampled_rows(optimizer)
    """
    if isinstance(optimizer, torch.optim.SparseAdam):
        msg = (
            "SparseAdam touches the rows of a sparse gradient alone as it is: leave update_sampled_rows() out"
        )
        raise ConfigError(msg)
    hooks = _SampledRowHooks()
    hook_steps(optimizer, before=hooks.before, after=hooks.after)


class _SampledRows(NamedTuple):
    """A parameter with a sparse gradient, and the small parameter of its sampled rows."""

    group: list[Tensor]  # the parameters of its group in the optimizer
    place: int  # its index among them
    parameter: Tensor
    small: nn.Parameter  # (rows, ...)
    rows: Tensor


class _SampledRowHooks:
    """The hooks that replace parameters with sparse gradients by small ones during a step."""

    def __init__(self) -> None:
        self._replaced: list[_SampledRows] = []

    def before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # The last step raised, so its `after` did not run: restore first, or its small parameters would stay.
        for sampled in self._replaced:
            sampled.group[sampled.place] = sampled.parameter
            optimizer.state.pop(sampled.small, None)
        self._replaced = []
        has_closure = any(callable(value) for value in (*args, *kwargs.values()))
        for group in optimizer.param_groups:
            for index, parameter in enumerate(group["params"]):
                if parameter.grad is None or not parameter.grad.is_sparse:
                    continue
                if has_closure:
                    msg = (
                        "a closure computes sparse gradients after update_sampled_rows() has looked at them; "
                        "compute the loss and its gradients before step(), and call it without a closure"
                    )
                    raise ConfigError(msg)
                self._replaced.append(_sample_rows(optimizer, group["params"], index, parameter))
        # Only now, when none has been refused.
        for sampled in self._replaced:
            sampled.group[sampled.place] = sampled.small

    @torch.no_grad()
    def after(self, optimizer: Optimizer, *_: Any) -> None:
        for group, index, parameter, small, rows in self._replaced:
            group[index] = parameter
            parameter.index_copy_(0, rows, small)
            state = optimizer.state[parameter]
            for key, value in optimizer.state.pop(small, {}).items():
                if not _has_shape_of(value, small):
                    state[key] = value
                    continue
                if not _has_shape_of(state.get(key), parameter):
                    state[key] = value.new_zeros(parameter.shape)
                state[key].index_copy_(0, rows, value)
        self._replaced = []


def _sample_rows(optimizer: Optimizer, group: list[Tensor], index: int, parameter: Tensor) -> _SampledRows:
    """Copy the rows of a sparse gradient into a small parameter, with their part of the optimizer's state."""
    grad: Tensor = parameter.grad.coalesce()  # type: ignore[union-attr]  # the caller has seen it
    rows = grad.indices()[0]
    small = nn.Parameter(parameter.detach().index_select(0, rows))
    copy_attributes(parameter, small)
    small.grad = grad.values()
    if parameter in optimizer.state:
        state = dict(optimizer.state[parameter])
        for key, value in state.items():
            if _has_shape_of(value, parameter):
                state[key] = value.index_select(0, rows)
        optimizer.state[small] = state
    return _SampledRows(group, index, parameter, small, rows)


def _has_shape_of(value: object, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == parameter.shape
