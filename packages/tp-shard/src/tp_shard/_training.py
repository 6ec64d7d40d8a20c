"""Tools for training loops over shards: clipping, loss scaling, parameter groups, sparse updates."""

import functools
import math
import zlib
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from tp_core.compare import Bound
from tp_core.errors import ConfigError, DisagreementError, NonFiniteLossError
from tp_core.state import hook_steps
from tp_core.tensors import copy_attributes

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
    tensor = () if ranks.process_group is None or ranks.size == 1 else (ranks.process_group,)
    # By the groups over which the gradients are split. The two first keys always exist: a rank without such
    # gradients still takes part in the sums, or the others would wait for it.
    gradients: dict[Axes, list[Tensor]] = {(): [], tensor: []}
    for parameter in parameters:
        grad = parameter.grad
        is_split = bool(tensor) and holds_shard(parameter)
        axes = sharded_over(parameter if grad is None else grad) + (tensor if is_split else ())
        if grad is None:
            gradients.setdefault(axes, [])
            continue
        if grad.is_sparse:  # its missing rows are 0
            grad = grad.coalesce().values()
        parts = _counted(parameter, grad, ranks) if is_split else [local(grad)]
        gradients.setdefault(axes, []).extend(part for part in parts if part.numel())
    # Of any parameter: NCCL takes no tensor of the CPU, from a rank without gradients either.
    device = local(parameters[0]).device if parameters else torch.device("cpu")
    norms = {
        axes: nn.utils.get_total_norm(own, norm_type, foreach=foreach).to(device)
        for axes, own in gradients.items()
    }
    dtype = functools.reduce(torch.promote_types, [norm.dtype for norm in norms.values()])
    return _join(norms, norm_type).to(dtype)


def _join(norms: dict[Axes, Tensor], norm_type: float) -> Tensor:
    """Return the norm of all gradients, from this rank's norms by the groups over which they are split.

    Collectives: an all-reduce for each group.
    """
    # In float64: powers of float32 norms overflow where the norm itself does not.
    is_max = norm_type == math.inf
    wide = {axes: norm.double() if is_max else norm.double().pow(norm_type) for axes, norm in norms.items()}
    for group in dict.fromkeys(group for axes in norms for group in axes):
        cut = [axes for axes in norms if group in axes]
        values = torch.stack([wide[axes] for axes in cut])
        # All ranks have the groups in the same order: in different orders they would wait for each other.
        dist.all_reduce(values, dist.ReduceOp.MAX if is_max else dist.ReduceOp.SUM, group=group)
        wide.update(zip(cut, values.unbind(), strict=True))
    everything = torch.stack(list(wide.values()))
    return everything.max() if is_max else everything.sum().pow(1 / norm_type)


def _counted(parameter: Tensor, grad: Tensor, group: Group) -> list[Tensor]:
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

    def __init__(self, device: str = "cuda", *, group: GroupLike = None, **kwargs: Any) -> None:
        super().__init__(device, **kwargs)
        self._group = as_group(group)

    # Private: torch's `step` and `unscale_` both call it, and no public method sees the flags of an overflow.
    # `a_scaler_leaves_the_step_out_on_all_ranks_or_on_none` notices its loss.
    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
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


_BLOCK = 1 << 20  # elements in float64 at a time: 8 MiB


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
    whole = _whole(model)
    if ranks.size == 1 or not whole:
        return
    mine = torch.stack([_described(p) for _, p in whole])  # (parameters, 3)
    everyones = _gather(mine, ranks)  # (ranks, parameters, 3)
    largest = everyones[:, :, 1].nan_to_num(0.0, 0.0, 0.0).max().item()
    # Autocast leaves no trace in a gradient: one in float32 may be that of a pass in bfloat16. It does not
    # touch float64, where norms of transformers are in float32. A missing sum is far above either.
    is_wide = all(parameter.dtype == torch.float64 for _, parameter in whole)
    bound = Bound.of([torch.float32 if is_wide else torch.bfloat16])
    for index, (name, _) in enumerate(whole):
        descriptions = everyones[:, index].tolist()
        first = descriptions[0]
        for rank, other in enumerate(descriptions):
            if _same(first, other, bound, largest):
                continue
            raise DisagreementError(_disagreement(name, rank, first, other, _have_one_state(ranks, mine)))


def _disagreement(name: str, rank: int, first: list[float], other: list[float], have_one_state: bool) -> str:
    words = [f"norm {norm:.6g}" if has else "none" for has, norm, _ in (first, other)]
    what = (
        f"ranks 0 and {rank} of a copy have different gradients of {name} ({words[0]} and {words[1]}), "
        "though all of them hold the whole of it, and would train apart. "
    )
    if not have_one_state:
        return what + (
            "Their random numbers differ, so that they drop different elements of what all hold: give the "
            "ranks of a copy one seed with torch.manual_seed(), and let no rank draw more than the others"
        )
    return what + (
        "Its module works on one rank's features or heads: give it ts.Replicated() in the plan, or "
        "ts.distributed.copy() in a model of your own. Or what all hold gets a dropout of each rank's own, "
        "such as ts.nn.ParallelDropout. Or the ranks of a copy read different samples. ts.verify() names the "
        "module if it is the plan"
    )


def _have_one_state(group: Group, near: Tensor) -> bool:
    """Return whether the default generators of the ranks are in the same state.

    Collectives: an all-gather of a checksum for each generator.
    """
    places = {torch.device("cpu"), near.device}
    checksums = [zlib.crc32(get_state(place, None).numpy().tobytes()) for place in sorted(places, key=str)]
    everyones = _gather(torch.tensor(checksums, dtype=torch.float64, device=near.device), group)
    return bool((everyones == everyones[0]).all())


def _whole(model: nn.Module) -> list[tuple[str, Tensor]]:
    """List the trained parameters that are not split."""
    # By layers as well as by marks: other code may have replaced a layer's parameters by ones without marks.
    shards = {
        id(p)
        for module in model.modules()
        if isinstance(module, ParallelLayer)
        for name, p in module._parameters.items()
        if name in module.splits
    }
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return [(name, p) for name, p in trained if id(p) not in shards and not holds_shard(p)]


def _described(parameter: Tensor) -> Tensor:
    """Return whether there is a gradient, its norm, and its dot product with fixed numbers."""
    # The dot product finds gradients of the same norm with other elements, without sending them.
    grad = parameter.grad
    if grad is None:
        return torch.zeros(3, dtype=torch.float64, device=parameter.device)
    grad = local(grad)  # under `fully_shard`
    if grad.is_sparse:
        grad = grad.coalesce().values()
    values = torch.view_as_real(grad) if grad.is_complex() else grad
    described = torch.zeros(3, dtype=torch.float64, device=values.device)
    described[0] = 1
    for block in values.reshape(-1).split(_BLOCK):
        wide = block.double()
        described[1] += wide.square().sum()
        described[2] += wide.dot(_numbers(values.device)[: wide.numel()])
    described[1].sqrt_()
    return described


@functools.lru_cache(maxsize=4)
def _numbers(device: torch.device) -> Tensor:
    return torch.arange(_BLOCK, dtype=torch.float64, device=device).cos_()


def _same(first: list[float], other: list[float], bound: Bound, largest: float) -> bool:
    if first[0] != other[0]:
        return False
    values = torch.tensor([first[1:], other[1:]], dtype=torch.float64)
    if not values.isfinite().all():
        return True  # a loss scaler or the check of the loss reports non-finite gradients
    allowed = bound.rtol * max(first[1], other[1]) + bound.atol * largest
    return bool((values[0] - values[1]).abs().max() <= allowed)


def _gather(mine: Tensor, group: Group) -> Tensor:
    everyones = [torch.empty_like(mine) for _ in range(group.size)]
    dist.all_gather(everyones, mine, group=group.handle)
    return torch.stack(everyones)


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
    exchange = _Exchange()
    hook_steps(optimizer, before=exchange.before, after=exchange.after)


class _Exchange:
    """The hooks that replace parameters with sparse gradients by small ones during a step."""

    def __init__(self) -> None:
        self._places: list[tuple[list[Tensor], int, Tensor, Tensor, Tensor]] = []

    def before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # The last step raised, so its `after` did not run: restore first, or its small parameters would stay.
        for parameters, i, parameter, small, _ in self._places:
            parameters[i] = parameter
            optimizer.state.pop(small, None)
        self._places = []
        for group in optimizer.param_groups:
            parameters = group["params"]
            for i, parameter in enumerate(parameters):
                if parameter.grad is None or not parameter.grad.is_sparse:
                    continue
                if any(callable(value) for value in (*args, *kwargs.values())):
                    msg = (
                        "a closure computes sparse gradients after update_sampled_rows() has looked at them; "
                        "compute the loss and its gradients before step(), and call it without a closure"
                    )
                    raise ConfigError(msg)
                grad = parameter.grad.coalesce()
                rows = grad.indices()[0]
                small = nn.Parameter(parameter.detach().index_select(0, rows))
                copy_attributes(parameter, small)
                small.grad = grad.values()
                if parameter in optimizer.state:
                    of_rows = {}
                    for key, value in optimizer.state[parameter].items():
                        of_rows[key] = value.index_select(0, rows) if _is_like(value, parameter) else value
                    optimizer.state[small] = of_rows
                self._places.append((parameters, i, parameter, small, rows))
        for parameters, i, _, small, _ in self._places:
            parameters[i] = small

    @torch.no_grad()
    def after(self, optimizer: Optimizer, *_: Any) -> None:
        for parameters, i, parameter, small, rows in self._places:
            parameters[i] = parameter
            parameter.index_copy_(0, rows, small)
            state = optimizer.state[parameter]
            for key, value in optimizer.state.pop(small, {}).items():
                if not _is_like(value, small):
                    state[key] = value
                    continue
                if not _is_like(state.get(key), parameter):
                    state[key] = value.new_zeros(parameter.shape)
                state[key].index_copy_(0, rows, value)
        self._places = []


def _is_like(value: object, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == parameter.shape
