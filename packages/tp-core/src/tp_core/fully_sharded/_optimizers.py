"""Optimizers over shards, and sharded gradients."""

import math
import re
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from tp_core.errors import ConfigError
from tp_core.modules._parameters import SHARDED_ATTRIBUTE, is_dtensor, is_sharded
from tp_core.state import SliceBuffer, fill_from_whole
from tp_core.state._files import Cut, is_cut
from tp_core.state._optimizers import hook_steps, is_zero_redundancy, note_whole_steps, steps_whole

# Their steps divide by norms of a whole matrix, orthogonalize or factorize it, or take products of all
# parameters: on a shard they would compute another update, without an error.
_WHOLE_MATRIX = re.compile(
    r"muon|adafactor|lbfgs|shampoo|galore|kfac|lamb$|lars$|^(soap|came|apollo|novograd|scion|kron|psgd)$",
    re.IGNORECASE,
)
# Of these LBFGS takes products of all parameters at once, and KFAC looks at the inputs of layers.
_MORE_THAN_A_MATRIX = re.compile(r"lbfgs|kfac", re.IGNORECASE)


def whole_matrix_optimizer(optimizer: Optimizer) -> str | None:
    """Return the name of an optimizer's class if its step depends on whole matrices, else ``None``.

    On a rank's shard of a matrix it would make another update than on the whole. The check goes by the
    names of its class and base classes.

    Example:
        >>> weight = torch.zeros(2, 2, requires_grad=True)
        >>> whole_matrix_optimizer(torch.optim.LBFGS([weight]))
        'LBFGS'
        >>> whole_matrix_optimizer(torch.optim.SGD([weight]))
    """
    return next((c.__name__ for c in type(optimizer).__mro__ if _WHOLE_MATRIX.search(c.__name__)), None)


def gathers_matrices(optimizer: Optimizer) -> bool:
    """Return whether an optimizer over shards steps whole matrices, one at a time, once it is prepared."""
    name = whole_matrix_optimizer(optimizer)
    # torch has no step of Rprop for DTensors: it assigns by a mask.
    return isinstance(optimizer, torch.optim.Rprop) or bool(name and not _MORE_THAN_A_MATRIX.search(name))


class WholeSteps:
    """Steps of an optimizer that needs whole matrices: each is gathered, stepped on all ranks, and cut again.

    One parameter at a time is whole, with its gradient and its state. Between the steps what has the
    parameter's shape is cut as it is, and other state is whole. Parameters that are not split are stepped as
    usual.

    Collective: at each step those of ``whole`` for the parameter, its gradient and its state, in the order of
    the optimizer's parameters.

    Args:
        optimizer: The optimizer; it treats each parameter by itself.
        whole: ``whole(parameter, value)`` returns the whole of a value that is cut as its parameter is.
        cut: As `tp_core.state.collect_state` takes it.
    """

    def __init__(self, optimizer: Optimizer, *, whole: Callable[[Tensor, Tensor], Tensor], cut: Cut) -> None:
        self._whole, self._cut = whole, cut
        self._groups: list[tuple[dict[str, Any], list[Tensor]]] = []
        if not steps_whole(optimizer):
            note_whole_steps(optimizer)
            hook_steps(optimizer, before=self._before, after=self._after)

    @torch.no_grad()
    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Step the parameters that are split, and leave the others to the step itself."""
        self._after(optimizer)  # a step that raised an error has left its groups
        if any(callable(value) for value in (*args, *kwargs.values())):
            msg = (
                f"{type(optimizer).__name__} steps gathered matrices here; a closure would compute their "
                "gradients too late; compute the loss and its gradients before step(), and call it without"
            )
            raise ConfigError(msg)
        self._groups = [(group, group["params"]) for group in optimizer.param_groups]
        numbers = {k: v for k, v in vars(optimizer).items() if isinstance(v, int | float)}
        try:
            for group, parameters in self._groups:
                settings = {key: value for key, value in group.items() if key != "params"}
                for parameter in parameters:
                    if parameter.grad is not None and is_cut(self._cut, parameter):
                        # From the same counters each time: the step of all parameters is one.
                        group.update(settings)
                        vars(optimizer).update(numbers)
                        self._step(optimizer, group, parameter)
                group["params"] = [p for p in parameters if not is_cut(self._cut, p)]
                if group["params"]:
                    group.update(settings)
        except BaseException:
            self._after(optimizer)
            raise
        vars(optimizer).update(numbers)
        optimizer.param_groups[:] = [group for group, _ in self._groups if group["params"]]

    def _after(self, optimizer: Optimizer, *_: Any) -> None:
        if self._groups:
            for group, parameters in self._groups:
                group["params"] = parameters
            # In place: an optimizer within another has the same list.
            optimizer.param_groups[:] = [group for group, _ in self._groups]
            self._groups = []

    def _step(self, optimizer: Optimizer, group: dict[str, Any], parameter: Tensor) -> None:
        weight = nn.Parameter(self._whole(parameter, parameter.detach()).clone())
        weight.grad = self._whole(parameter, parameter.grad)  # type: ignore[arg-type]  # the caller has seen it
        kept = optimizer.state.pop(parameter, None)
        if kept is not None:
            optimizer.state[weight] = {
                key: self._whole(parameter, value)
                if isinstance(value, Tensor) and is_sharded(value)
                else value
                for key, value in kept.items()
            }
        group["params"] = [weight]
        optimizer.param_groups[:] = [group]
        step = type(optimizer).step
        # Below torch's wrapper, which calls the hooks: this is a part of the step that they are for.
        step = getattr(step, "__wrapped__", step) if hasattr(step, "hooked") else step
        step(optimizer)
        fill_from_whole(SliceBuffer(self._cut, parameter, None).target, weight)
        made = optimizer.state.pop(weight, None)
        if made:
            optimizer.state[parameter] = {k: self._part(v, parameter, weight) for k, v in made.items()}

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
    dtype = grads[0].dtype if grads else torch.float32
    total = _power([grad.to_local() for grad in split], norm_type, device)
    if split:
        # Over the last axis only, the shards': along another axis are copies, which must count once.
        group = split[0].device_mesh.get_group(split[0].device_mesh.ndim - 1)
        operation = dist.ReduceOp.MAX if norm_type == math.inf else dist.ReduceOp.SUM
        dist.all_reduce(total, operation, group=group)
    others = _power(whole, norm_type, device)
    if norm_type == math.inf:
        return torch.maximum(total, others).to(dtype)
    return ((total + others) ** (1 / norm_type)).to(dtype)


def _power(grads: list[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """Return the sum of the elements' powers, or their maximum; 0 for none."""
    norm = nn.utils.get_total_norm([grad for grad in grads if grad.numel()], norm_type)
    # float64, as squares of large gradients overflow float32; mps has none.
    norm = norm.to(device, torch.float32 if device.type == "mps" else torch.float64)
    return norm if norm_type == math.inf else norm**norm_type


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


# -- optimizers ------------------------------------------------------------------------------------


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

    def part(value: object) -> object:
        if not isinstance(value, Tensor) or value.shape != shard.shape:  # the whole's, which is empty now
            return value
        place = SliceBuffer(lambda _, whole: whole, shard, value.dtype)
        fill_from_whole(place.target, value)
        return place.take()

    with torch.no_grad():
        kept = optimizer.state.pop(parameter)
        optimizer.state[shard] = {key: part(value) for key, value in kept.items()}
