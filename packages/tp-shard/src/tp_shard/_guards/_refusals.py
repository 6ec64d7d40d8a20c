"""What other people's code would silently do wrong with a shard is refused by name.

Torch has hooks for steps of optimizers. For the rest functions are replaced, as
:mod:`tp_shard._groups._patches` says; each does what it did wherever no shard is concerned.
"""

import functools
import inspect
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import clip_grad
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from tp_core.errors import ConfigError, StateError
from tp_core.internal import is_zero_redundancy, whole_matrix_optimizer

from tp_shard._groups import _patches
from tp_shard._groups._group import ALONE, current_data_group
from tp_shard._shards._marks import holds_shard

__all__ = ["check_optimizer", "guard_saving", "install_guards"]

_checked: "weakref.WeakSet[Optimizer]" = weakref.WeakSet()


@_patches.while_split
def install_guards() -> list[_patches.Undo]:
    """Watch optimizers' steps and torch's own clipping from now on; return what ends it."""
    original = clip_grad._clip_grads_with_norm_  # what clip_grad_norm_ calls, imported early or late
    handle = register_optimizer_step_pre_hook(lambda optimizer, *_: _check_once(optimizer))

    @functools.wraps(original)
    def clip(parameters: Any, *args: Any, **kwargs: Any) -> None:
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if _patches.is_active() and any(holds_shard(p) for p in parameters):
            msg = (
                "torch's clip_grad_norm_ takes a rank's shards for the whole, and each rank would clip by a "
                "norm of its own; call ts.clip_grad_norm_, which takes the same arguments"
            )
            raise ConfigError(msg)
        original(parameters, *args, **kwargs)

    return [handle.remove, _patches.replace(clip_grad, "_clip_grads_with_norm_", clip)]


def _check_once(optimizer: Optimizer) -> None:
    if optimizer not in _checked:
        check_optimizer(optimizer)
        _checked.add(optimizer)


def check_optimizer(optimizer: Optimizer) -> None:
    """Make sure that an optimizer with shards treats each element independently, and keeps shards apart.

    Raises:
        ConfigError: Its step depends on whole matrices, of which it would see shards; or it sends what it
            has updated to ranks that hold other shards.
    """
    if not any(holds_shard(p) for g in optimizer.param_groups for p in g["params"]):
        return
    if is_zero_redundancy(optimizer):
        _check_zero_redundancy(optimizer)
    name = whole_matrix_optimizer(optimizer)
    if name is not None:
        msg = (
            f"{name} computes with whole matrices, and would take a rank's shard for one: other updates than "
            "without splitting. Give it the parameters that are not split (ts.parameter_groups keeps them "
            "apart) and the shards to an element-wise optimizer such as AdamW, or leave those layers whole"
        )
        raise ConfigError(msg)


def _check_zero_redundancy(optimizer: Any) -> None:
    """Make sure that a ``ZeroRedundancyOptimizer`` exchanges parameters with those who hold the same shards.

    Raises:
        ConfigError: Its ranks are others.
    """
    data = current_data_group() or ALONE
    same = [dist.get_rank()] if data.process_group is None else dist.get_process_group_ranks(data.handle)
    its = dist.get_process_group_ranks(optimizer.process_group)
    if sorted(its) != sorted(same):
        msg = (
            f"ZeroRedundancyOptimizer over the ranks {its} would give ranks the shards of others: this "
            f"rank's are held by {same} alone. Take the optimizer that it wraps (its optimizer_class), with "
            "ShardOptions(data='fsdp') where copies of the model are to share its state; or make it with "
            "process_group=ts.distributed.get_data_group()"
        )
        raise ConfigError(msg)


def guard_saving(model: nn.Module) -> None:
    """Let ``save_pretrained()`` of the model's classes refuse to write shards as if they were whole."""
    for kind in {cls for module in model.modules() for cls in type(module).__mro__}:
        original = vars(kind).get("save_pretrained")
        if inspect.isfunction(original) and not hasattr(original, "_tp_shard"):
            kind.save_pretrained = _whole_only(original)  # type: ignore[attr-defined]  # it has one, as seen


def _whole_only(original: Any) -> Any:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def save_pretrained(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind_partial(self, *args, **kwargs).arguments
        given = {**given, **given.get("kwargs", {})}
        if given.get("state_dict") is None and any(holds_shard(p) for p in self.parameters()):
            msg = (
                f"{type(self).__name__} is split, and save_pretrained() would write this rank's shards under "
                "the names of whole tensors; on every rank call state = ts.collect_state_dict(model, "
                'model.state_dict(), to="rank0"), and on rank 0 model.save_pretrained(folder, '
                "state_dict=state)"
            )
            raise StateError(msg)
        return original(self, *args, **kwargs)

    save_pretrained._tp_shard = True  # type: ignore[attr-defined]  # our own note
    return save_pretrained
