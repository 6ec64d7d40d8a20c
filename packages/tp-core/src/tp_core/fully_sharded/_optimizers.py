"""Optimizers over shards, and sharded gradients."""

import functools
import math
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from tp_core.device_types import wide_float
from tp_core.errors import ConfigError, StepError, TpError
from tp_core.fully_sharded._plain_values import CommonValues, PlainValues, copy_of
from tp_core.modules._parameters import SHARDED_ATTRIBUTE, is_dtensor, is_sharded, norm_dtype
from tp_core.modules._user_state import copy_attributes
from tp_core.random import capture_rng_state, preserve_rng_state
from tp_core.state import SliceBuffer, fill_from_whole
from tp_core.state._files import Cut, is_cut
from tp_core.state._optimizers import hook_steps, is_zero_redundancy, note_whole_steps, steps_whole

# Their steps divide by norms of a whole matrix, orthogonalize or factorize it, or take products of all
# parameters: on a shard they would compute another update, without an error. Other optimizers are tried; some
# of these begin too late for a trial, as SOAP and Shampoo, or need a closure.
_WHOLE_MATRIX = re.compile(
    r"muon|adafactor|lbfgs|shampoo|galore|kfac|lamb$|lars$|^(soap|came|apollo|novograd|scion|kron|psgd)$",
    re.IGNORECASE,
)
# Of these LBFGS takes products of all parameters at once, and KFAC looks at the inputs of layers.
_MORE_THAN_A_MATRIX = re.compile(r"lbfgs|kfac", re.IGNORECASE)


_EXPLAINS = "_tp_explains"
"""An attribute of a step whose errors say that it computes over shards."""


def whole_matrix_optimizer(optimizer: Optimizer) -> str | None:
    """Return the name of an optimizer's class if its step depends on whole matrices, else ``None``.

    On a rank's shard of a matrix it would make another update than on the whole. Well-known ones are known by
    the names of their classes, and torch's own. Another one makes a few trial steps, with a small matrix and
    with a part of it, which leave no trace.

    Example:
        >>> weight = torch.zeros(2, 2, requires_grad=True)
        >>> whole_matrix_optimizer(torch.optim.LBFGS([weight]))
        'LBFGS'
        >>> whole_matrix_optimizer(torch.optim.SGD([weight]))
    """
    for kind in type(optimizer).__mro__:
        if _WHOLE_MATRIX.search(kind.__name__):
            return kind.__name__
    if type(optimizer).__module__.startswith("torch.") or steps_whole(optimizer):
        return None
    if _mixes_elements(optimizer):
        return type(optimizer).__name__
    return None


_TRIAL_STEPS = 3  # the first may only fill the state


@torch.no_grad()
def _mixes_elements(optimizer: Optimizer) -> bool:
    """Return whether an optimizer's update of an element depends on others of its matrix.

    It steps a small tensor of each number of dimensions that its parameters have, and the first half of that
    tensor along each dimension. Where it cannot, or draws random numbers, nothing is known.
    """
    for group in optimizer.param_groups:
        for example in {p.dim(): p for p in group["params"] if p.dim() and p.is_floating_point()}.values():
            shape = [8] + [6] * (example.dim() - 1)
            generator = torch.Generator().manual_seed(example.dim())
            drawn = torch.randn(_TRIAL_STEPS + 1, *shape, generator=generator)
            # Small rates: in float32 an update may be lost beside the value.
            dtype = wide_float(example.device)
            values = drawn.to(example.device, dtype)
            for dim, length in enumerate(shape):
                # Halves with other norms: of random values alone their ratio to a gradient's is the same.
                sizes = torch.linspace(1, 4, length, dtype=dtype, device=example.device)
                values[0] *= sizes.view([-1 if i == dim else 1 for i in range(len(shape))])
            try:
                whole = _updates(optimizer, group, values)
                for dim in range(example.dim()):
                    part = _updates(optimizer, group, values.narrow(dim + 1, 0, shape[dim] // 2))
                    expected = whole.narrow(dim + 1, 0, shape[dim] // 2)
                    # Far above roundings, as of moments in blocks of 8 bits, and far below another norm.
                    if any(a.dist(b) > 0.1 * b.norm() for a, b in zip(part, expected, strict=True)):
                        return True
            except _NothingKnownError:
                return False
    return False


class _NothingKnownError(Exception):
    """Error of a trial step that failed, or has drawn random numbers, so that its update says nothing."""


def _updates(optimizer: Optimizer, group: dict[str, Any], values: Tensor) -> Tensor:
    """Return how each of some trial steps changes a tensor, (step, ...); the optimizer stays as it is.

    ``values`` are those before the first step, and the gradient of each step: (1 + steps, ...).
    """
    trial = nn.Parameter(values[0].clone())
    updates = []
    with _without_trace(optimizer, group, [trial]), _without_hooks(optimizer):
        rate = group.get("lr")
        if isinstance(rate, Tensor) and not rate.any():
            rate.fill_(0.01)
        elif rate == 0:  # as at the beginning of a warm-up
            group["lr"] = 0.01
        devices = [] if trial.is_cpu else [trial.device]
        with preserve_rng_state(devices):
            before = capture_rng_state(devices)
            for gradient in values[1:]:
                trial.grad = gradient.clone()
                old = trial.detach().clone()
                try:
                    _step_only(optimizer, group, [trial])
                except Exception as error:  # a closure is needed, say, or state that was made before
                    raise _NothingKnownError from error
                updates.append(trial - old)
            if capture_rng_state(devices) != before:
                raise _NothingKnownError
    return torch.stack(updates)


@contextmanager
def _without_hooks(optimizer: Optimizer) -> Iterator[None]:
    """Leave out the hooks of steps: a class may call the step of its base, for which torch calls them."""
    # Private: torch has no public way to its hooks.
    tables: list[Any] = [
        _global_optimizer_pre_hooks,
        _global_optimizer_post_hooks,
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
    ]
    kept = [dict(table) for table in tables]
    for table in tables:
        table.clear()
    try:
        yield
    finally:
        for table, hooks in zip(tables, kept, strict=True):
            table.update(hooks)


def gathers_matrices(optimizer: Optimizer) -> bool:
    """Return whether an optimizer over shards steps whole matrices, one at a time, once it is prepared."""
    name = whole_matrix_optimizer(optimizer)
    # torch has no step of Rprop for DTensors: it assigns by a mask.
    return isinstance(optimizer, torch.optim.Rprop) or bool(name and not _MORE_THAN_A_MATRIX.search(name))


class WholeSteps:
    """Steps of an optimizer that needs whole matrices: each is gathered, stepped on all ranks, and cut again.

    One parameter at a time is whole, with its gradient and its state. Between the steps what has the
    parameter's shape is cut as it is, and other state is whole. Parameters that are not split, or have no
    gradient, are stepped as usual.

    The steps of all matrices are one step: each begins with the settings, counters and common state that the
    optimizer had, and these count once.

    Collective: at each step those of ``whole`` for the parameter, its gradient and its state, in the order of
    the optimizer's parameters.

    Args:
        optimizer: The optimizer; it treats each parameter by itself.
        whole: ``whole(parameter, value)`` returns the whole of a value that is cut as its parameter is.
        cut: As `tp_core.state.collect_state` takes it.

    Raises:
        ConfigError: At the first step: the optimizer computes with several parameters at once.
    """

    def __init__(self, optimizer: Optimizer, *, whole: Callable[[Tensor, Tensor], Tensor], cut: Cut) -> None:
        self._whole, self._cut = whole, cut
        self._groups: list[tuple[dict[str, Any], list[Tensor]]] = []
        self._common: CommonValues | None = None
        self._checked: dict[int, dict[str, Any]] = {}  # groups, by their ids: later ones may have the same
        if not steps_whole(optimizer):
            note_whole_steps(optimizer)
            hook_steps(optimizer, before=self._before, after=self._after)

    @torch.no_grad()
    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Step the parameters that are split, and leave the others to the step itself."""
        self._restore_groups(optimizer)  # a step that raised an error has left its groups
        if any(callable(value) for value in (*args, *kwargs.values())):
            msg = (
                f"{type(optimizer).__name__} steps gathered matrices here; a closure would compute their "
                "gradients too late; compute the loss and its gradients before step(), and call it without"
            )
            raise ConfigError(msg)
        _check_no_global_norm(optimizer)
        self._groups = [(group, group["params"]) for group in optimizer.param_groups]
        common = self._common = CommonValues(optimizer)
        try:
            for group, parameters in self._groups:
                settings = PlainValues(group, without={"params"})
                split = [p for p in parameters if is_cut(self._cut, p)]
                rest = [p for p in parameters if not is_cut(self._cut, p)]
                stepped = [p for p in split if p.grad is not None]
                if split and not stepped and not rest:
                    # One without a gradient: an optimizer may count the step of a group all the same.
                    stepped = [min(split, key=torch.numel)]
                for parameter in stepped:
                    settings.restore()
                    common.restore()
                    self._step(optimizer, group, parameter)
                    common.note()
                group["params"] = rest
                if rest:
                    settings.restore()  # their step counts
        except BaseException:
            self._restore_groups(optimizer)
            raise
        common.restore()
        optimizer.param_groups[:] = [group for group, _ in self._groups if group["params"]]

    def _after(self, optimizer: Optimizer, *_: Any) -> None:
        self._restore_groups(optimizer)
        if self._common is not None:
            self._common.commit()
            self._common = None

    def _restore_groups(self, optimizer: Optimizer) -> None:
        if self._groups:
            for group, parameters in self._groups:
                group["params"] = parameters
            # In place: an optimizer within another has the same list.
            optimizer.param_groups[:] = [group for group, _ in self._groups]
            self._groups = []

    def _step(self, optimizer: Optimizer, group: dict[str, Any], parameter: Tensor) -> None:
        weight = nn.Parameter(self._whole(parameter, parameter.detach()).clone())
        copy_attributes(parameter, weight)
        vars(weight).pop(SHARDED_ATTRIBUTE, None)  # it is whole
        if parameter.grad is not None:
            weight.grad = self._whole(parameter, parameter.grad)
        kept = optimizer.state.pop(parameter, None)
        if kept is not None:
            for key, value in kept.items():
                if isinstance(value, Tensor) and is_sharded(value):
                    kept[key] = self._whole(parameter, value)
            optimizer.state[weight] = kept
        if self._checked.get(id(group)) is not group and weight.grad is not None:
            self._checked[id(group)] = group
            _check_steps_alone(optimizer, group, weight)
        _step_only(optimizer, group, [weight])
        fill_from_whole(SliceBuffer(self._cut, parameter, None).target, weight)
        state = optimizer.state.pop(weight, None)
        if state:
            optimizer.state[parameter] = {k: self._part(v, parameter, weight) for k, v in state.items()}

    def _part(self, value: object, parameter: Tensor, weight: Tensor) -> object:
        """Return this rank's part of a state's value, if it has the parameter's shape."""
        # Not of a subclass, such as a quantized one, which may not be cut anywhere: it stays whole.
        if type(value) is not Tensor or value.shape != weight.shape:
            return value
        place = SliceBuffer(self._cut, parameter, value.dtype)
        fill_from_whole(place.target, value)
        part = place.take().to(parameter.device)
        setattr(part, SHARDED_ATTRIBUTE, True)
        return part


def _step_only(optimizer: Optimizer, group: dict[str, Any], parameters: list[Tensor]) -> None:
    """Run the optimizer's step with these parameters of one group alone."""
    group["params"] = parameters
    optimizer.param_groups[:] = [group]
    step = type(optimizer).step
    # Below torch's wrapper, which calls the hooks: this is a part of the step that they are for.
    if hasattr(step, "hooked"):
        step = getattr(step, "__wrapped__", step)
    step(optimizer)


def _check_no_global_norm(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        if group.get("max_grad_norm"):
            raise ConfigError(_steps_together(optimizer))


def _steps_together(optimizer: Optimizer) -> str:
    return (
        f"{type(optimizer).__name__} computes with several parameters at once, as with the norm of all "
        "gradients (max_grad_norm), and here each matrix is split over ranks, and stepped by itself. Make it "
        "with max_grad_norm=None, and clip by clip_norm= of fit() or update(); or take the backend 'ddp', "
        "with whole parameters on each rank"
    )


@torch.no_grad()
def _check_steps_alone(optimizer: Optimizer, group: dict[str, Any], weight: nn.Parameter) -> None:
    """Check that an optimizer steps a matrix as it does beside another one, by two trial steps.

    Raises:
        ConfigError: It does not: it computes with all of its parameters at once.
    """
    try:
        alone = _after_trial(optimizer, group, weight, is_alone=True)
        beside = _after_trial(optimizer, group, weight, is_alone=False)
    except Exception:  # noqa: BLE001 - it knows its parameters by name, say: then nothing is known
        return
    if len(alone) != len(beside):
        return
    for value, other in zip(alone, beside, strict=True):
        # Far above roundings, as of products of matrices in bfloat16, and far below a norm that is clipped.
        if value.shape == other.shape and (value - other).norm() > 0.1 * value.norm():
            raise ConfigError(_steps_together(optimizer))


def _after_trial(
    optimizer: Optimizer, group: dict[str, Any], weight: nn.Parameter, *, is_alone: bool
) -> list[Tensor]:
    """Return the update of a copy of a matrix, and its state after it; the optimizer stays as it is."""
    trial = nn.Parameter(weight.detach().clone())
    other = nn.Parameter(weight.detach().clone())
    gradient: Any = weight.grad  # the caller has seen it
    trial.grad = gradient.clone()
    other.grad = gradient * 1024.0 + 1.0
    with _without_trace(optimizer, group, [trial, other]):
        for copied in (trial, other):
            copy_attributes(weight, copied)
            if weight in optimizer.state:
                optimizer.state[copied] = {k: copy_of(v) for k, v in optimizer.state[weight].items()}
        devices = [] if weight.is_cpu else [weight.device]
        stepped: list[Tensor] = [trial] if is_alone else [trial, other]
        with preserve_rng_state(devices):
            _step_only(optimizer, group, stepped)
        state = optimizer.state.get(trial) or {}
        values = [trial - weight, *(value for value in state.values() if type(value) is Tensor)]
        return [value.float() for value in values if value.is_floating_point()]


@contextmanager
def _without_trace(optimizer: Optimizer, group: dict[str, Any], trials: list[nn.Parameter]) -> Iterator[None]:
    """Put back at the end what trial steps with some parameters of a group leave in the optimizer."""
    settings, common = PlainValues(group, without={"params"}), CommonValues(optimizer)
    groups, parameters = [*optimizer.param_groups], group["params"]
    try:
        yield
    finally:
        for trial in trials:
            optimizer.state.pop(trial, None)
        optimizer.param_groups[:] = groups
        group["params"] = parameters
        settings.restore()
        common.restore()


# -- gradients -------------------------------------------------------------------------------------


def local_gradients(model: nn.Module) -> list[Tensor]:
    """Return the local parts of the gradients, without copies; empty ones are left out."""
    local = [_local(p.grad) for p in model.parameters() if p.grad is not None]
    return [grad for grad in local if grad.numel()]


@torch.no_grad()
def total_shard_norm(model: nn.Module, norm_type: float, *, device: torch.device) -> Tensor:
    """Return the norm of the whole gradient: a scalar tensor, equal on all ranks.

    Collective: one all-reduce of a number over the ranks that hold the model together.
    """
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    split: list[Any] = [grad for grad in grads if is_dtensor(grad)]
    whole = [grad for grad in grads if not is_dtensor(grad)]
    dtype = norm_dtype(model.parameters())
    total = _power([grad.to_local() for grad in split], norm_type, device)
    if split:
        # Over the last axis only, the shards': along another axis are copies, which must count once.
        group = split[0].device_mesh.get_group(split[0].device_mesh.ndim - 1)
        if norm_type == math.inf:
            operation = dist.ReduceOp.MAX
        else:
            operation = dist.ReduceOp.SUM
        dist.all_reduce(total, operation, group=group)
    others = _power(whole, norm_type, device)
    if norm_type == math.inf:
        return torch.maximum(total, others).to(dtype)
    return ((total + others) ** (1 / norm_type)).to(dtype)


def _power(grads: list[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """Return the sum of the elements' powers, or their maximum; 0 for none."""
    norm = nn.utils.get_total_norm([grad for grad in grads if grad.numel()], norm_type)
    norm = norm.to(device, wide_float(device))  # squares of large gradients overflow float32
    if norm_type == math.inf:
        return norm
    return norm**norm_type


def _local(tensor: Tensor) -> Tensor:
    dtensor: Any = tensor
    local: Tensor = dtensor.to_local() if is_dtensor(tensor) else tensor
    return local


class WholeParameters:
    """Parameters that every rank holds whole, since torch cannot gather them with the others.

    Collective: in backward, one all-reduce for each gradient once it is complete.
    """

    def __init__(self, parameters: list[nn.Parameter], group: dist.ProcessGroup | None = None) -> None:
        self.reduces = True
        self._group = group
        for parameter in parameters:
            if parameter.requires_grad and parameter.numel():
                parameter.register_post_accumulate_grad_hook(self._average)

    def _average(self, parameter: Tensor) -> None:
        """Average a gradient; earlier gradients in the same tensor are equal on all ranks, and stay.

        Collective: one all-reduce over the group.
        """
        if self.reduces and parameter.grad is not None:
            dist.all_reduce(parameter.grad, group=self._group)
            parameter.grad.div_(dist.get_world_size(self._group))


# -- errors of code over shards --------------------------------------------------------------------


def explain_shard_errors(error: Exception, models: Iterable[nn.Module]) -> None:
    """Raise an error that names the remedy for torch's own one of code that computes with shards.

    A callback or a loop has the parameters of a fully sharded model as DTensors, and torch has no rule for
    some operations on them, as in ``parameters_to_vector``, ``parameter.data.set_()`` and adaptive clipping.

    Raises:
        StepError: The error is such a one.
    """
    if isinstance(error, TpError) or not _is_of_dtensors(error):
        return
    if not any(is_dtensor(parameter) for model in models for parameter in model.parameters()):
        return
    first_line = next(iter(str(error).splitlines()), "")
    msg = (
        "code of this run computes with fully sharded parameters, which are DTensors, as torch cannot "
        f"({type(error).__name__}: {first_line}). Write one parameter at a time, in place: "
        "parameter.data.mul_(0.9), parameter.data.copy_(values); take a whole one by parameter.full_tensor() "
        "on all ranks; or take the backend 'ddp', with whole parameters on each rank"
    )
    raise StepError(msg) from error


def _is_of_dtensors(error: Exception) -> bool:
    """Return whether torch's code for DTensors has raised an error: by its frames, or by its words in C++."""
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_globals.get("__name__", "").startswith("torch.distributed.tensor."):
            return True
        trace = trace.tb_next
    return isinstance(error, RuntimeError) and re.search(r"DTensor|shard", str(error)) is not None


# -- optimizers ------------------------------------------------------------------------------------


def explain_step_errors(optimizer: Optimizer) -> None:
    """Say in errors of an optimizer's step that it computes over shards; torch's own know of them."""
    own: Any = optimizer.step
    if type(optimizer).__module__.startswith("torch.") or not isinstance(own, MethodType):
        return
    function: Any = own.__func__
    if hasattr(function, _EXPLAINS):
        return

    # With its attributes: schedulers mark the step that they have wrapped, and warn of another one.
    @functools.wraps(function)
    def step(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        try:
            return function(self, *args, **kwargs)
        except torch.OutOfMemoryError:
            raise
        except (AssertionError, IndexError, RuntimeError) as error:
            has_closure = any(callable(value) for value in (*args, *kwargs.values()))
            parameters = [p for group in self.param_groups for p in group["params"]]
            if isinstance(error, TpError) or has_closure or not any(map(is_dtensor, parameters)):
                raise
            msg = (
                f"the step of {type(self).__name__} failed over parameters that are DTensors, of which each "
                f"rank has a part, here or on another rank: {type(error).__name__}: {error}. Take an "
                "optimizer that treats each element by itself, such as AdamW or SGD, or the backend 'ddp', "
                "with whole parameters on each rank"
            )
            raise StepError(msg) from error

    setattr(step, _EXPLAINS, True)
    optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]  # of this object alone


def check_optimizer(optimizer: Optimizer) -> None:
    """Check that an optimizer treats each element by itself, as shards need it.

    LBFGS does not, but is right where it can concatenate shards without padding: with shards of one size.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if not any(map(is_dtensor, parameters)):
        return
    if type(optimizer) is torch.optim.LBFGS and all(map(_is_even, parameters)):
        return
    check_whole_steps(optimizer)
    fused = any(group.get("fused") for group in optimizer.param_groups)
    if fused and not isinstance(optimizer, torch.optim.Adam):  # AdamW is one
        msg = (
            f"torch has no fused {type(optimizer).__name__} for DTensors, which the parameters are "
            "here; leave fused=True out"
        )
        raise ConfigError(msg)
    if is_zero_redundancy(optimizer):
        msg = (
            "ZeroRedundancyOptimizer gives each rank the state of other whole parameters, and here "
            "parameters and state are sharded by the backend; give the optimizer that it wraps (its "
            "optimizer_class), made from model.parameters()"
        )
        raise ConfigError(msg)


def check_whole_steps(optimizer: Optimizer) -> None:
    """Check that an optimizer over shards gets whole matrices, if it needs them."""
    name = whole_matrix_optimizer(optimizer)
    if gathers_matrices(optimizer):
        if not steps_whole(optimizer):
            msg = (
                f"{type(optimizer).__name__} computes with whole matrices, and the parameters are this "
                "rank's shards; give it to fit(), or to trainer.prepare(model, optimizer), which gather each "
                "matrix for its step"
            )
            raise ConfigError(msg)
    elif name is not None:
        msg = (
            f"{name} computes with whole matrices, all at once or with the inputs of layers, and the "
            "parameters are this rank's shards: other updates than on one device. Take another optimizer, "
            "such as AdamW, SGD or Muon, or the backend 'ddp', with whole parameters on each rank"
        )
        raise ConfigError(msg)


def _is_even(parameter: Any) -> bool:
    """Return whether a parameter is trained, and cut into shards of one size."""
    if not is_dtensor(parameter) or not parameter.requires_grad:
        return False
    shards: int = parameter.device_mesh.size(parameter.device_mesh.ndim - 1)
    return parameter.numel() > 0 and parameter.size(0) % shards == 0


def move_state(optimizer: Optimizer, parameter: Tensor, shard: nn.Parameter) -> None:
    """Move an optimizer's state of a parameter to the shard that replaces it, cut to the shard's part."""
    if parameter not in optimizer.state:
        return
    kept = optimizer.state.pop(parameter)
    for key, value in kept.items():
        if isinstance(value, Tensor) and value.shape == shard.shape:
            kept[key] = part_of_whole(value, shard)
    optimizer.state[shard] = kept


@torch.no_grad()
def part_of_whole(value: Tensor, shard: Tensor) -> Tensor:
    """Return the part of a whole tensor that this rank holds, cut as a shard is."""
    place = SliceBuffer(lambda _, whole: whole, shard, value.dtype)
    fill_from_whole(place.target, value)
    return place.take()
