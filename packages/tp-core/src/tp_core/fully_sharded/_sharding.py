"""Sharding of models, steps on them, and models that the user has sharded."""

import functools
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tp_core._contracts._batch import StepOutput
from tp_core._contracts._job import Job
from tp_core._transfer import makes_other_parameters, move_module
from tp_core._trees import tree_leaves
from tp_core.errors import ModelError, StepError
from tp_core.fully_sharded._exchange import (
    AssignmentWatch,
    GradientHooks,
    ReplacedParameter,
    retire,
    share_attributes,
)
from tp_core.fully_sharded._optimizers import WholeParameters, part_of_whole
from tp_core.fully_sharded._options import FullyShardOptions, parameter_type, reduction_type, remedy
from tp_core.fully_sharded._units import find_units
from tp_core.modules._blocks import without_cache
from tp_core.modules._mixins import Mixin, mix_in
from tp_core.modules._parameters import check_no_first_fsdp, is_dtensor
from tp_core.modules._user_state import Hooks, attributes_of, has_gradient_hooks, take_gradient_hooks
from tp_core.sessions._per_module import PerModule
from tp_core.tensors._deferred import initial_value, is_deferred, materialize

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_RUN = "_tp_run"
"""The name of a method on sharded models that calls its argument between torch's forward hooks."""


class Sharding:
    """Shards models, and runs steps on them.

    Args:
        job: The job.
        options: The options of the sharding.
        make_mesh: Returns the mesh: an axis of the ranks that hold a model together, after an axis of copies
            where there are any. It is called for the first model.
        group: The ranks of that mesh, which all start with the first rank's weights; ``None`` for all ranks.
        share: Called with each module on its device, before it is sharded. A tensor-parallel backend makes
            its ranks agree there on the tensors that they do not split.

    Attributes:
        mesh: The mesh; the mesh of a model that the user has sharded may be set in its place.
    """

    def __init__(
        self,
        job: Job,
        options: FullyShardOptions,
        make_mesh: "Callable[[], DeviceMesh]",
        *,
        group: dist.ProcessGroup | None = None,
        share: Callable[[nn.Module], None] | None = None,
    ) -> None:
        self._job = replace(job, model=None)  # which may end before the session
        self._options = options
        self._device = job.devices[0]
        self._make_mesh = make_mesh
        self._group = group
        self._share = share
        self._whole: PerModule[WholeParameters] = PerModule()
        self._writes: PerModule[WriteWatch] = PerModule()
        self._assignments: PerModule[AssignmentWatch] = PerModule()
        self._hooks: PerModule[list[GradientHooks]] = PerModule()
        self._went_back = False  # in the present call of `run`: a backward pass
        self._running = 0  # calls of `run` that have not ended, one within another
        # The shard that replaced a parameter of the model, by the parameter's id. Weakly: a reference to the
        # whole parameter would keep its memory.
        self._shards: PerModule[dict[int, tuple[weakref.ref[nn.Parameter], nn.Parameter]]] = PerModule()

    @functools.cached_property
    def mesh(self) -> "DeviceMesh":
        """The ranks that hold a model together, and its copies."""
        return self._make_mesh()

    def shard(self, model: nn.Module) -> None:
        """Shard a model in place, unit by unit, from the weights of the first rank.

        Collective: a broadcast of each parameter and buffer that is not sharded yet; an all-gather of
        parameters in no unit.
        """
        from tp_core.fully_sharded._part_writes import carry_part_writes  # here: importing DTensor is slow

        carry_part_writes()
        if makes_other_parameters(self._device) and not any(map(is_deferred, model.parameters())):
            # All at once, for devices of torch's extensions: assigning to `data` across devices fails there.
            move_module(model, self._device)
        # Weakly, so that each unit's whole parameters are freed before the next unit is sharded.
        plain: dict[str, tuple[int, weakref.ref[nn.Parameter]]] = {
            name: (id(p), weakref.ref(p)) for name, p in model.named_parameters(remove_duplicate=False)
        }
        sharded = sharded_modules(model)
        hooks, attributes = _taken_user_state(model)
        self._shard(model)
        for name, parameter in model.named_parameters():
            vars(parameter).update(attributes.get(name, {}))
        shards = self._shards.get(model) or {}
        for name, shard in model.named_parameters(remove_duplicate=False):
            key, reference = plain[name]
            whole = reference()
            if whole is not None and whole is not shard:
                shards[key] = reference, shard
                if type(whole) is ReplacedParameter:  # under another name
                    continue
                if whole.grad is not None:
                    shard.grad = part_of_whole(whole.grad, shard)
                # An optimizer that is prepared later has it: it would be in memory beside what is gathered.
                retire(whole, name)
        self._shards[model] = shards
        self._hooks[model] = [
            GradientHooks(name, parameter, *hooks.get(name, ({}, {})))
            for name, parameter in model.named_parameters()
        ]
        for hooked in self._hooks.get(model) or []:
            hooked.listen()
        watch = self._assignments[model] = AssignmentWatch(model)
        # Whatever is saved or exported comes from there.
        model.register_state_dict_pre_hook(lambda *_: watch.check())
        self._begin(model, sharded)

    def shard_of(self, parameter: Tensor) -> nn.Parameter | None:
        for model in self._shards:
            replaced, shard = (self._shards.get(model) or {}).get(id(parameter), (None, None))
            if (
                replaced is not None and replaced() is parameter
            ):  # a later tensor may have the id of a dead one
                return shard
        return None

    def _shard(self, model: nn.Module) -> None:
        sharded = sharded_modules(model)
        if sharded:
            units = {}
        else:
            units = find_units(model, self._options.units).modules
        if self._options.activation_checkpointing:
            for module in units.values() or [model]:
                _checkpoint_activations(module)
        whole: list[nn.Parameter] = []
        # Inner units first, as fully_shard demands: an outer one takes only the parameters that are left.
        for module in reversed([*self._with_batch_norms(model, units)]):
            whole += self._shard_unit(module, is_root=False)
        if model not in sharded:
            whole += self._shard_unit(model, is_root=True)
        self._whole[model] = WholeParameters(whole, self._group)
        self._prefetch([module for module in sharded_modules(model) if module is not model])

    def _with_batch_norms(self, model: nn.Module, units: dict[str, nn.Module]) -> Iterator[nn.Module]:
        """Yield the units, and batch norms that must keep their dtype, in the model's order."""
        chosen = set(units.values())
        lowers = parameter_type(self._options, self._job) is not None
        for module in model.modules():
            is_norm = isinstance(module, nn.modules.batchnorm._BatchNorm) and module.affine
            if module in chosen or (lowers and is_norm and module is not model):
                yield module

    def _shard_unit(self, module: nn.Module, *, is_root: bool) -> list[nn.Parameter]:
        """Shard a module's parameters in no inner unit; return the parameters that stay whole."""
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

        self._share_weights(module)
        odd = _not_gathered_together(module)
        writes = WriteWatch(module, went_back=lambda: self._went_back)
        if is_root:
            self._writes[module] = writes
        else:
            writes.hook(module)
        is_norm = isinstance(module, nn.modules.batchnorm._BatchNorm)
        if is_root and type(module).forward is nn.Module.forward:
            mix_in(_WithForward, module)
        # None: torch keeps the root's parameters after forward, as backward begins with them.
        if is_root:
            reshard_after_forward = None
        else:
            reshard_after_forward = bool(self._options.reshard_after_forward)
        if is_norm:
            param_dtype = None
        else:
            param_dtype = parameter_type(self._options, self._job)
        offload_policy = CPUOffloadPolicy() if self._options.offload else OffloadPolicy()
        fully_shard(
            module,
            mesh=self.mesh,
            reshard_after_forward=reshard_after_forward,
            mp_policy=MixedPrecisionPolicy(
                param_dtype=param_dtype,
                reduce_dtype=reduction_type(self._options, self._job),
                cast_forward_inputs=False,  # autocast casts them where it is needed
            ),
            offload_policy=offload_policy,
            ignored_params=set(odd),
        )
        if not is_root:
            writes.hook_begin(module)
        return odd

    @torch.no_grad()
    def _share_weights(self, module: nn.Module) -> None:
        """Move tensors that are not sharded to the device, with the first rank's values.

        Collective: a broadcast of each, after those of ``share``.
        """
        materialize(module, self._first_value)
        tensors = [t for t in [*module.parameters(), *module.buffers()] if not is_dtensor(t)]
        for tensor in tensors:
            tensor.data = tensor.data.to(self._device).contiguous()  # fully_shard takes no channels_last
        if self._share is not None:
            self._share(module)
        # fully_shard takes each rank's own values: without the broadcast ranks with different seeds would
        # hold shards of different models.
        for tensor in tensors:
            dist.broadcast(tensor.data, group_src=0, group=self._group)

    def _first_value(self, tensor: Tensor) -> Tensor:
        """Return the initial value of a deferred tensor on the first rank, an empty tensor on the others."""
        if dist.get_rank(self._group) == 0:
            return initial_value(tensor).to(self._device)
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)

    def _prefetch(self, units: list[Any]) -> None:
        ahead = self._options.prefetch
        if ahead == 1:
            return
        for i, unit in enumerate(units):
            unit.set_modules_to_forward_prefetch(units[i + 1 : i + 1 + ahead])
            unit.set_modules_to_backward_prefetch(units[max(0, i - ahead) : i][::-1])

    def _begin(self, model: nn.Module, sharded: list[Any]) -> None:
        """Make ``model`` torch's root module, and run an empty forward to raise its errors now.

        torch takes the first module with a forward pass for the root; a step may call an inner one first.

        Collective: an all-gather of parameters in no unit.
        """
        from torch.distributed.fsdp import register_fsdp_forward_method

        setattr(model, _RUN, _call)
        setattr(model, "__deepcopy__", _refuse_copy)  # noqa: B010 - torch's own error names no remedy
        register_fsdp_forward_method(model, _RUN)
        # Of a call outside of `run`: before torch gathers the parameters, after that, and at the end.
        model.register_forward_pre_hook(self._begin_call, prepend=True)
        model.register_forward_pre_hook(self._begin_writes)
        model.register_forward_hook(self._end_call)
        # Private to torch: the types in which parameters are gathered are known after it, and may be changed
        # until the first gathering.
        model._get_fsdp_state()._lazy_init()  # type: ignore[operator]  # of FSDPModule
        for module in sharded_modules(model):
            for group in parameter_groups(module):
                for fsdp_param in group.fsdp_params:
                    share_attributes(fsdp_param)
                if module not in sharded:
                    keep_vectors(group)
                reduce_in_one_type(group)
                self._notice_backward(group)
        with torch.no_grad():
            self.run(model, dict)
        if callable(getattr(model, "generate", None)):
            self._gather_in_generate(model)

    def _notice_backward(self, group: Any) -> None:
        """Record a backward pass within the step, after which torch gathers anew."""
        begin = group.pre_backward

        def pre_backward(*args: Any) -> None:
            self._went_back = self._went_back or bool(self._running)
            begin(*args)

        group.pre_backward = pre_backward

    def _gather_in_generate(self, model: Any) -> None:
        """Make ``model.generate`` gather parameters in no unit: peft's calls the model inside, past the root.

        Collective: in each call an all-gather of these.
        """
        method = model.generate

        @functools.wraps(method)
        def generate(*args: Any, **kwargs: Any) -> Any:
            try:
                return self.run(model, lambda: method(*args, **kwargs))
            finally:
                self._reshard_all()  # others read the shards between two steps

        model.generate = generate

    def run(self, model: nn.Module, call: Callable[[], StepOutput]) -> StepOutput:
        """Return ``call()``, run as the forward pass of a sharded model.

        Collective: in forward an all-gather for each unit, in backward reduce-scatters of gradients.
        """
        writes = self._writes.get(model)

        def watched() -> StepOutput:
            if writes is not None:
                writes.begin()
            output = call()
            if writes is not None:
                writes.after()
            if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves(output)):
                _stay_gathered(model)
            return output

        if not self._running:
            self._went_back = False
            self.check_assignments(model)
        self._reshard_all()
        self._running += 1
        try:
            output: StepOutput = getattr(model, _RUN)(watched)
        except BaseException:
            # In torch since 2.13. Without it the next forward pass would continue in the middle of this one.
            reset = getattr(model, "reset_iter_state", None)
            if reset is not None:
                reset()
            raise
        finally:
            self._running -= 1
            self._end()
        return output

    def _reshard_all(self) -> None:
        """Reshard what forward passes without a backward pass have left gathered, unless one is under way.

        The weights may have been changed since, by an optimizer or an average of them, and torch would
        compute with the gathered ones: of the root always, of units with ``reshard_after_forward=False``.
        """
        if not self._running:
            for model in self._shards:
                reshard(model)

    def _end(self) -> None:
        """Reshard after a forward pass that no backward pass follows: ``parameters()`` are shards again."""
        if not torch.is_grad_enabled():
            self._reshard_all()

    # -- a call of the model outside of `run`

    def _begin_call(self, model: nn.Module, *_: object) -> None:
        if not self._running:
            self._went_back = False
            self.check_assignments(model)
        self._reshard_all()

    def _begin_writes(self, model: nn.Module, *_: object) -> None:
        writes = self._writes.get(model)
        if writes is not None and not self._running:
            writes.begin()

    def _end_call(self, model: nn.Module, *_: object) -> None:
        writes = self._writes.get(model)
        if writes is not None and not self._running:
            writes.after()
        self._end()

    @property
    def gathered_type(self) -> torch.dtype | None:
        """The type in which parameters are gathered; ``None`` for their own."""
        return parameter_type(self._options, self._job)

    @property
    def remedy(self) -> str:
        """A sentence for out-of-memory errors."""
        return f"Where parameters are fully sharded, {remedy(self._options)}."

    def check_assignments(self, model: nn.Module) -> None:
        """Check that no assignment to the data of a model's parameters was lost.

        Raises:
            StepError: One was.
        """
        watch = self._assignments.get(model)
        if watch is not None:
            watch.check()

    def check_all_assignments(self) -> None:
        """Check the parameters of all models: `check_assignments`."""
        for model in self._assignments:
            self.check_assignments(model)

    def run_backward(self, run: Callable[[], None]) -> None:
        """Run a backward pass in which the user's hooks see its gradients over all ranks.

        Collective: those of `GradientHooks` for each parameter with hooks.
        """
        hooked: list[GradientHooks] = []
        for model in self._hooks:
            self._take_hooks_of_gathered(model)
            for hooks in self._hooks.get(model) or []:
                hooks.listen()
                if hooks.exist():
                    hooked.append(hooks)
        for hooks in hooked:
            hooks.begin()
        try:
            run()
        finally:
            for hooks in hooked:
                hooks.end()

    def _take_hooks_of_gathered(self, model: nn.Module) -> None:
        """Take the gradient hooks that the step has put on gathered parameters of a model."""
        of_shards = {id(hooks.parameter): hooks for hooks in self._hooks.get(model) or []}
        for module in sharded_modules(model):
            for group in parameter_groups(module):
                for fsdp_param in group.fsdp_params:
                    gathered = getattr(fsdp_param, "_unsharded_param", None)
                    hooks = of_shards.get(id(fsdp_param.sharded_param))
                    if gathered is not None and hooks is not None and has_gradient_hooks(gathered):
                        hooks.take_from(gathered)

    def reduces(self, model: nn.Module, *, is_on: bool) -> None:
        # With hooks each gradient is reduced at once: they are for the one over all ranks.
        is_on = is_on or any(hooks.exist() for hooks in self._hooks.get(model) or [])
        model.set_requires_gradient_sync(is_on)  # type: ignore[operator]  # as above
        if (whole := self._whole.get(model)) is not None:
            whole.reduces = is_on


def _taken_user_state(
    model: nn.Module,
) -> tuple[dict[str, tuple[Hooks, Hooks]], dict[str, dict[str, Any]]]:
    """Return the gradient hooks, which are removed, and the attributes of parameters that are not sharded."""
    hooks: dict[str, tuple[Hooks, Hooks]] = {}
    attributes: dict[str, dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if not is_dtensor(parameter):
            hooks[name] = take_gradient_hooks(parameter)
            attributes[name] = attributes_of(parameter)
    return hooks, attributes


def _checkpoint_activations(module: nn.Module) -> None:
    """Make a module recompute its activations in the backward pass.

    Only its forward is replaced; names and class stay. torch's checkpoint wrapper would add a prefix to
    every name.
    """
    forward = module.forward

    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        args = tuple(without_cache(module, value) for value in args)
        kwargs = {name: without_cache(module, value) for name, value in kwargs.items()}
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    module.forward = checkpointed


class _WithForward(Mixin):
    """A forward for containers: fully_shard refuses a ModuleDict or ModuleList as it is.

    A step of the user's calls what is in it, within the method that `Sharding.run` calls.
    """

    def forward(self, *_: Any, **__: Any) -> Any:
        # A ModuleDict's own, which raises.
        return nn.Module.forward(self)


def _refuse_copy(_: object) -> NoReturn:
    msg = (
        "a fully sharded model cannot be copied (copy.deepcopy, torch's AveragedModel): copy it before it is "
        "prepared, and prepare the copy too; averages of weights are callbacks, ExponentialMovingAverage and "
        "StochasticWeightAveraging"
    )
    raise ModelError(msg)


def _call(call: Callable[[], StepOutput]) -> StepOutput:
    output = call()
    # torch registers a hook on the output of a forward pass; on a view it may be lost, with a warning.
    if isinstance(output, Tensor) and output._is_view():
        return output.clone()
    return output


def _stay_gathered(model: Any) -> None:
    """Keep the parameters in no unit gathered from the end of a step on: backward begins with them.

    The step's own call of the model has ended the root's forward pass in torch's eyes. At the end of the
    step torch would free them, and backward would gather them again, beside all activations.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

    for group in parameter_groups(model):
        group._training_state = TrainingState.FORWARD


def parameter_groups(module: Any) -> list[Any]:
    """Return torch's groups of the parameters of a sharded module; private to torch."""
    state = module._get_fsdp_state()
    # One group in torch 2.11, a list of them since.
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return [group for group in groups if group is not None]


def keep_vectors(group: Any) -> None:
    """Gather parameters of one dimension in their own type: biases, norms, a temperature, a gate.

    They are few elements, and what is computed in float32 on purpose is mostly computed with them: the
    exponential of a temperature of 4.605 in bfloat16 is 1 percent off.
    """
    for fsdp_param in group.fsdp_params:
        if fsdp_param.sharded_param.dim() == 1:
            fsdp_param.param_dtype = None


def reduce_in_one_type(group: Any) -> None:
    """Bring the gradients of a unit to one type before torch reduces them, as it demands.

    They are of several types if vectors keep their own, and if a parameter is first used in the last of
    several accumulated batches: torch accumulates in the type of the reduction (pytorch#160279).
    """
    reduce = group.post_backward

    def post_backward(*unused: Any) -> None:
        if group.reduce_grads:
            _bring_to_one_type(group)
        reduce(*unused)

    group.post_backward = post_backward


def _bring_to_one_type(group: Any) -> None:
    accumulated = None
    fresh = []
    for fsdp_param in group.fsdp_params:
        fsdp_param.accumulate_unsharded_grad_if_needed()
        if fsdp_param.unsharded_accumulated_grad is not None:
            accumulated = fsdp_param.unsharded_accumulated_grad.dtype
            continue
        gathered = getattr(fsdp_param, "_unsharded_param", None)
        if gathered is not None and gathered.grad is not None:
            fresh.append((fsdp_param, gathered))
    types = {gathered.grad.dtype for _, gathered in fresh}
    if accumulated is not None:
        types.add(accumulated)
    if len(types) < 2:
        return
    if accumulated is None:
        common = group.mp_policy.param_dtype
    else:
        common = accumulated
    for fsdp_param, gathered in fresh:
        if gathered.grad.dtype != common:
            fsdp_param.unsharded_accumulated_grad = gathered.grad.to(common)
            gathered.grad = None


def _not_gathered_together(module: nn.Module) -> list[nn.Parameter]:
    """Return parameters that torch cannot gather with the others: scalars, empty ones, other dtypes."""
    elements: dict[torch.dtype, int] = {}
    parameters = [p for p in module.parameters() if not is_dtensor(p)]
    tiny = [p for p in parameters if not (p.dim() and p.numel())]
    trained = [p for p in parameters if p.requires_grad and p.dim() and p.numel()]
    for parameter in trained:
        elements[parameter.dtype] = elements.get(parameter.dtype, 0) + parameter.numel()
    if len(elements) < 2:
        return tiny
    most = max(elements, key=elements.__getitem__)
    return [*tiny, *(parameter for parameter in trained if parameter.dtype != most)]


# -- Models that were sharded before they came to the backend ---------------------------------------


def reshard(model: nn.Module) -> None:
    """Reshard parameters that forward passes without a backward pass have left gathered."""
    for unit in sharded_modules(model):
        unit.reshard()


def sharded_modules(model: nn.Module) -> list[Any]:
    """Return the modules that have been through ``fully_shard``, in the model's order."""
    # Where it is not imported, no module can have been sharded, and the import takes long.
    torch_fsdp = sys.modules.get("torch.distributed.fsdp")
    if torch_fsdp is None:
        return []
    return [module for module in model.modules() if isinstance(module, torch_fsdp.FSDPModule)]


def describe_presharded(model: nn.Module) -> str | None:
    """Return a description of a model that the user has sharded by ``fully_shard``; ``None`` for a plain one.

    Raises:
        ModelError: The model was sharded in a way that the backend cannot continue with.
    """
    check_no_first_fsdp(model)
    modules = sharded_modules(model)
    if not modules:
        return None
    presharded_mesh(model)
    return f"taken over as fully_shard left it, with {len(modules)} module(s) sharded"


def presharded_mesh(model: nn.Module) -> "DeviceMesh | None":
    """Return the mesh that ``fully_shard`` has sharded a model over; ``None`` for a plain one.

    Raises:
        ModelError: There are several meshes, or parameters with other placements.
    """
    mesh: DeviceMesh | None = None
    for name, parameter in model.named_parameters():
        its: DeviceMesh | None = getattr(parameter, "device_mesh", None)
        if its is None:
            continue
        if mesh is not None and its != mesh:
            msg = (
                f"the model's parameters lie on different meshes: {name!r} on {its}, others on {mesh}; "
                "backend 'fsdp' takes over a model that fully_shard has sharded over one mesh, of all ranks"
            )
            raise ModelError(msg)
        mesh = its
        placements = parameter.placements  # type: ignore[attr-defined]  # a DTensor's
        if any(p.is_shard() for p in placements[:-1]) or not placements[-1].is_shard():
            msg = (
                f"the model's {name!r} has the placements {placements}, which fully_shard alone does not "
                "make; give the plain model, which backend 'fsdp' shards"
            )
            raise ModelError(msg)
    return mesh


# -- Weights that a forward pass writes, which would be lost with the gathered copy ---------------


_WENT_BACK = (
    "the step made a backward pass of its own (torch.autograd.grad, for a gradient penalty, say), after "
    "which fully sharded parameters are shards again; take the backend 'ddp', with whole ones on each rank"
)


class WriteWatch:
    """A check that the forward pass of a unit does not write its parameters.

    It notices writes that version counters count and data that is replaced. In the first, second, fourth,
    eighth pass and so on it notices writes through ``.data``, too, by sums of the values.

    Args:
        module: The unit, before it is sharded; parameters of inner units are not watched.
        went_back: Returns whether the step has made a backward pass, which writes gathered parameters, too.
    """

    def __init__(self, module: nn.Module, *, went_back: Callable[[], bool]) -> None:
        self._went_back = went_back
        self._places = [
            (f"{prefix}.{name}".lstrip("."), inner._parameters, name)
            for prefix, inner in module.named_modules()
            for name, parameter in inner._parameters.items()
            if parameter is not None and not is_dtensor(parameter)
        ]
        self._class = type(module).__name__
        self._before: list[tuple[int, int]] | None = None
        self._sums: list[Tensor] | None = None
        self._passes = 0

    def hook(self, module: nn.Module) -> None:
        """Register the check at the end of each call.

        Before the unit is sharded, so that this hook runs before torch's own, which drops the weights.
        """
        module.register_forward_hook(self.after)

    def hook_begin(self, module: nn.Module) -> None:
        """Register the check at the beginning of each call.

        After the unit is sharded, so that this hook runs after torch's own, which gathers the weights.
        """
        module.register_forward_pre_hook(self.begin)

    def begin(self, *_: Any) -> None:
        """Record the versions of the parameters, now that they are gathered."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
            self._before = None
            return
        self._before = self._now()
        self._passes += 1
        # Sums cost a pass over the weights. A write may begin late, so not the first pass alone has them.
        is_power_of_two = self._passes & (self._passes - 1) == 0
        self._sums = self._sums_now() if is_power_of_two else None

    def after(self, *_: Any) -> None:
        before, self._before = self._before, None
        if before is None or torch.compiler.is_compiling():
            return
        now = self._now()
        if len(now) != len(before):  # torch dropped what was gathered, as after a backward pass
            raise StepError(_WENT_BACK)
        changed = [a != b for a, b in zip(before, now, strict=True)]
        if self._sums is not None:
            sums = zip(self._sums, self._sums_now(), strict=True)
            changed = [c or not a.equal(b) for c, (a, b) in zip(changed, sums, strict=True)]
            self._sums = None
        if not any(changed):
            return
        if self._went_back():
            raise StepError(_WENT_BACK)
        names = [name for name, row, key in self._places if _is_whole(row[key])]
        msg = (
            f"the forward pass wrote the parameter {names[changed.index(True)]!r} of the model's "
            f"{self._class}, which each rank has gathered for this pass "
            "alone: fully sharded, what is written is lost. Change weights between two steps, on what "
            "model.parameters() gives then, compute the changed weight again in each forward pass "
            "(torch.nn.utils.parametrize), or take the backend 'ddp'"
        )
        raise StepError(msg)

    def _tensors(self) -> list[Tensor]:
        return [row[key] for _, row, key in self._places if _is_whole(row[key])]

    def _now(self) -> list[tuple[int, int]]:
        return [(t._version, t.data_ptr()) for t in self._tensors()]

    @torch.no_grad()
    def _sums_now(self) -> list[Tensor]:
        return [t.sum().nan_to_num() for t in self._tensors()]


def _is_whole(tensor: Tensor | None) -> bool:
    return tensor is not None and not is_dtensor(tensor)
