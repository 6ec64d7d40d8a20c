"""Replacements in torch and other libraries that would silently handle a shard as a whole tensor.

Each either handles shards correctly or refuses them with an error. Importing this module only registers the
replacements; they take place when groups are formed, see ``_groups/_patches``.
"""

import functools
import inspect
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary
from tp_core.errors import ConfigError, StateError
from tp_core.fully_sharded import check_whole_steps
from tp_core.modules import Mixin, mix_in
from tp_core.state import is_inner_step, is_zero_redundancy

from tp_shard._groups import _patches
from tp_shard._groups._group import ALONE, current_data_group, current_group
from tp_shard._shards import ParallelLayer, get_parallel_dim, holds_shard

# -- DistributedDataParallel beside parallel layers -----------------------------------------------
# DDP averages gradients over its ranks, and starts with a broadcast of rank 0's parameters. Among ranks that
# hold different shards both would be wrong. DDP reads the names of parameters to ignore once, when it is
# made, and only from the very module that it wraps. So while there are model-parallel groups its `__init__`
# is replaced and sets these names. The ignored parameters are averaged here, among the ranks that hold the
# same.


# Private: the attribute in which DDP looks for names to ignore. Without it DDP would overwrite the shards
# with rank 0's (`a_split_layer_alone_under_ddp_keeps_its_shards`).
_IGNORED = "_ddp_params_and_buffers_to_ignore"
# By identity, because tensors compare element by element; weak, so that a dropped model does not live on.
_hooks = WeakTensorKeyDictionary()


def register_ddp_parameters_to_ignore(module: nn.Module) -> list[str]:
    """Make DistributedDataParallel ignore the parameters of parallel layers.

    They are still averaged where that is right: a shard among the ranks that hold the same one, a parameter
    that all ranks have among all ranks. The call is optional, before or after the module is wrapped: DDP over
    ranks with different shards makes it itself.

    Args:
        module: The module that DDP will wrap, or has wrapped.

    Returns:
        The names of the parameters of parallel layers in ``module``.

    Example:
        >>> m = nn.ModuleDict({"layer1": nn.Linear(20, 20), "layer2": ts.nn.ParallelLinear(20, 30)})
        >>> register_ddp_parameters_to_ignore(m)
        ['layer2.weight', 'layer2.bias']
    """
    if dist.is_initialized():
        _patches.install()
    names = _parallel_names(module)
    if not isinstance(module, DistributedDataParallel):
        # DDP looks up a parameter of the wrapped module itself as "name" in one place and ".name" in another.
        ignored = {*getattr(module, _IGNORED, ()), *names}
        ignored |= {f".{name}" for name in names if "." not in name}
        setattr(module, _IGNORED, sorted(ignored))
    return names


def _parallel_names(module: nn.Module) -> list[str]:
    names = []
    for path, layer in module.named_modules():
        for name, parameter in layer._parameters.items():
            if parameter is None:
                continue
            if isinstance(layer, ParallelLayer) or get_parallel_dim(parameter) is not None:
                full_name = f"{path}.{name}" if path else name
                names.append(full_name)
    return names


@_patches.while_split
def patch_ddp() -> list[_patches.Undo]:
    """Make each new DDP handle shards; return the functions that end this."""
    original = DistributedDataParallel.__init__
    signature = inspect.signature(original)

    @functools.wraps(original)
    def initialize(self: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        if not _patches.is_active():
            original(self, module, *args, **kwargs)
            return
        options = signature.bind_partial(self, module, *args, **kwargs).arguments
        if _holds_different_shards(module, options):
            register_ddp_parameters_to_ignore(module)
        if _all_ignored(module):
            _wrap_all_split(self, module, options)
        else:
            original(self, module, *args, **kwargs)
        _average_ignored(self)

    return [_patches.replace(DistributedDataParallel, "__init__", initialize)]


class _AllSplit(Mixin):
    """A mixin for a DDP with nothing left for it to average: hooks average all shards of its model.

    Torch refuses to wrap such a model. Buffers are broadcast as DDP does.

    Collectives: a broadcast of each buffer that is not split, before each forward pass in training.
    """

    def forward(self: Any, *inputs: Any, **kwargs: Any) -> Any:
        if self.broadcast_buffers and self.require_backward_grad_sync and self.training:
            _broadcast_buffers(self)
        return self.module(*inputs, **kwargs)


def _all_ignored(module: nn.Module) -> bool:
    """Return whether DDP has to ignore all trained parameters; without any, its own error is right."""
    trained = {n for n, p in module.named_parameters() if p.requires_grad}
    ignored = set(getattr(module, _IGNORED, ())) & set(_parallel_names(module))
    return bool(trained) and trained <= ignored


def _wrap_all_split(ddp: Any, module: nn.Module, options: dict[str, Any]) -> None:
    """Set the attributes that torch's ``__init__`` would, except those of its reducer: there is none."""
    mix_in(_AllSplit, ddp)  # in place: this runs inside `__init__`, which cannot return another object
    nn.Module.__init__(ddp)
    ddp.module = module
    ddp.device_mesh = options.get("device_mesh")
    ddp.process_group = _ddp_group(options) or dist.group.WORLD
    ddp.parameters_to_ignore = set(getattr(module, _IGNORED))
    ddp.broadcast_buffers = options.get("broadcast_buffers", True)
    ddp.require_backward_grad_sync = True
    ddp.require_forward_param_sync = True
    ddp.find_unused_parameters = options.get("find_unused_parameters", False)
    ddp.gradient_as_bucket_view = options.get("gradient_as_bucket_view", False)
    ddp.dim = options.get("dim", 0)
    ddp.device_ids = options.get("device_ids")
    ddp.output_device = None
    ddp.device = next(module.parameters()).device
    _broadcast_buffers(ddp)


def _ddp_group(options: dict[str, Any]) -> Any:
    """Return the group that a new DDP is given, by itself or by a mesh; ``None`` for all ranks."""
    mesh = options.get("device_mesh")
    if mesh is not None:
        return mesh.get_group(0)
    return options.get("process_group")


def _broadcast_buffers(ddp: DistributedDataParallel) -> None:
    """Copy the first rank's buffers to all ranks.

    Collectives: a broadcast for each buffer that is not split.
    Ranks hold: varying -> replicated.
    """
    for name, buffer in ddp.module.named_buffers():
        # A split buffer differs by rank, and a broadcast would overwrite it.
        if name not in ddp.parameters_to_ignore and get_parallel_dim(buffer) is None:
            dist.broadcast(buffer, group_src=0, group=ddp.process_group)


def _holds_different_shards(module: nn.Module, options: dict[str, Any]) -> bool:
    """Return whether the ranks of a new DDP hold different shards of a layer."""
    ranks = set(dist.get_process_group_ranks(_ddp_group(options)))
    for layer in module.modules():
        if isinstance(layer, ParallelLayer) and layer.group.size > 1:
            shard_ranks = dist.get_process_group_ranks(layer.group.handle)
            if len(ranks.intersection(shard_ranks)) > 1:
                return True
    return False


def _average_ignored(ddp: DistributedDataParallel) -> None:
    """Broadcast the parallel parameters that DDP ignores, and average their gradients from now on.

    Collectives: a broadcast of each such parameter; backward an all-reduce of each gradient.
    Ranks hold: varying -> replicated.
    """
    ignored = set(ddp.parameters_to_ignore)
    for name in _parallel_names(ddp.module):
        if name not in ignored:
            continue
        parameter = ddp.module.get_parameter(name)
        group: dist.ProcessGroup | None = ddp.process_group
        if holds_shard(parameter):
            group = _holders(ddp, name)
        if group is None or dist.get_world_size(group) == 1:
            continue
        # As DDP does with its own parameters: copies from different seeds would start, and stay, different.
        dist.broadcast(parameter.data, group_src=0, group=group)
        if parameter in _hooks:  # wrapped before: with two hooks each step would communicate twice
            _hooks[parameter].remove()
        if parameter.requires_grad:
            hook = functools.partial(_average, group=group, size=dist.get_world_size(group))
            _hooks[parameter] = parameter.register_post_accumulate_grad_hook(hook)


def _holders(ddp: DistributedDataParallel, name: str) -> dist.ProcessGroup | None:
    """Return the group of ranks that hold the same shard as this one, ``None`` if there are no others."""
    data = current_data_group()
    if data is not None and data.size > 1:
        return data.process_group
    layer = ddp.module.get_submodule(name.rpartition(".")[0])
    tensor_group = current_group()
    if isinstance(layer, ParallelLayer):
        tensor_group = layer.group
    tensor_size = 1 if tensor_group is None else tensor_group.size
    world = dist.get_world_size(ddp.process_group)
    if world > tensor_size:
        msg = (
            f"DistributedDataParallel has {world} ranks, more than hold {name} together, and which of "
            "them hold the same shard is not known; call ts.distributed.init_process_group() with a "
            "group size or a mesh of data by tensor first"
        )
        raise ConfigError(msg)
    return None


def _average(parameter: Tensor, *, group: dist.ProcessGroup, size: int) -> None:
    """Average a gradient over a group.

    Under gradient accumulation a gradient contains parts that were averaged before. That stays right, because
    the average of equal parts is the part itself.

    Collectives: one all-reduce.
    Ranks hold: partial -> replicated.
    """
    if parameter.grad is not None:
        dist.all_reduce(parameter.grad, group=group)
        parameter.grad.div_(size)


# -- Optimizers, clipping and saving that would take a shard for a whole tensor -------------------
# Torch has hooks for the steps of optimizers. The other functions are replaced while there are groups;
# without a shard among its arguments each does what it did.


# By optimizer, the numbers of parameters in its groups: `add_param_group` may bring shards later.
# Weak: an optimizer that the user drops must not live on here.
_checked: "weakref.WeakKeyDictionary[Optimizer, list[int]]" = weakref.WeakKeyDictionary()


@_patches.while_split
def install_guards() -> list[_patches.Undo]:
    """Check the steps of optimizers and torch's clipping from now on; return the functions that end this."""
    # Private: `clip_grad_norm_` itself may have been imported by name before, and calls this one in any case.
    # `torchs_own_clipping_is_refused` notices its loss.
    original = clip_grad._clip_grads_with_norm_
    handle = register_optimizer_step_pre_hook(_check_step)

    @functools.wraps(original)
    def clip(parameters: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(parameters, Tensor):
            parameters = [parameters]
        parameters = list(parameters)  # an iterator is read twice
        if _patches.is_active() and any(holds_shard(p) for p in parameters):
            msg = (
                "torch's clip_grad_norm_ takes a rank's shards for the whole, and each rank would clip by a "
                "norm of its own; call ts.clip_grad_norm_, which takes the same arguments"
            )
            raise ConfigError(msg)
        original(parameters, *args, **kwargs)

    return [handle.remove, _patches.replace(clip_grad, "_clip_grads_with_norm_", clip)]


def _check_step(optimizer: Optimizer, *_: Any) -> None:
    counts = [len(group["params"]) for group in optimizer.param_groups]
    # Not within a step of a subclass: a trial would change the state that it has made ready.
    if _checked.get(optimizer) != counts and not is_inner_step(optimizer):
        check_optimizer(optimizer)
        _checked[optimizer] = counts


def check_optimizer(optimizer: Optimizer) -> None:
    """Raise unless an optimizer with shards treats each element independently, and keeps shards apart."""
    if not any(holds_shard(p) for g in optimizer.param_groups for p in g["params"]):
        return
    if is_zero_redundancy(optimizer):
        _check_zero_redundancy(optimizer)
    if isinstance(optimizer, torch.optim.Rprop):
        # It computes element by element; only its step of DTensors is missing in torch.
        return
    check_whole_steps(optimizer)


def _check_zero_redundancy(optimizer: Any) -> None:
    """Raise unless a ``ZeroRedundancyOptimizer`` exchanges parameters with the holders of the same shards."""
    data = current_data_group() or ALONE
    holders = [dist.get_rank()]
    if data.process_group is not None:
        holders = dist.get_process_group_ranks(data.handle)
    ranks = dist.get_process_group_ranks(optimizer.process_group)
    if sorted(ranks) != sorted(holders):
        msg = (
            f"ZeroRedundancyOptimizer over the ranks {ranks} would give ranks the shards of others: this "
            f"rank's are held by {holders} alone. Take the optimizer that it wraps (its optimizer_class), "
            "with ShardOptions(data='fsdp') where copies of the model are to share its state; or make it "
            "with process_group=ts.distributed.get_data_group()"
        )
        raise ConfigError(msg)


def guard_saving(model: nn.Module) -> None:
    """Make ``save_pretrained()`` of the model's classes refuse to write shards as whole tensors."""
    for kind in {cls for module in model.modules() for cls in type(module).__mro__}:
        original = vars(kind).get("save_pretrained")
        if inspect.isfunction(original) and not hasattr(original, "_tp_shard"):
            kind.save_pretrained = _whole_only(original)  # type: ignore[attr-defined]  # it has one, as seen


def _whole_only(original: Any) -> Any:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def save_pretrained(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind_partial(self, *args, **kwargs).arguments
        arguments = {**arguments, **arguments.get("kwargs", {})}
        if arguments.get("state_dict") is None and any(holds_shard(p) for p in self.parameters()):
            msg = (
                f"{type(self).__name__} is split, and save_pretrained() would write this rank's shards under "
                "the names of whole tensors; on every rank call state = ts.collect_state_dict(model, "
                'model.state_dict(), to="rank0"), and on rank 0 model.save_pretrained(folder, '
                "state_dict=state)"
            )
            raise StateError(msg)
        return original(self, *args, **kwargs)

    save_pretrained._tp_shard = True  # type: ignore[attr-defined]  # so that it is wrapped once
    return save_pretrained
