"""What a user hung on parameters, once shards have taken their places: hooks, attributes, assignments.

torch's ``fully_shard`` makes two new parameters of each: a shard, and what is gathered from all shards. It
drops what the user set on the old one, and the old one stays in the user's hands.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tp_core._trees import tree_leaves
from tp_core.data._step_outputs import drop_gradient
from tp_core.errors import StepError
from tp_core.modules._parameters import is_dtensor
from tp_core.modules._user_state import Hooks, copy_attributes, take_gradient_hooks
from tp_core.state import fill_from_whole, whole

SHARDS_ALONE = (
    "the loss was computed with a parameter of a unit that is fully sharded, outside of the unit's forward "
    "pass, when this rank had its shard alone. Call the module itself (which calls its forward), or leave it "
    "out of the option units: what is in none is there in all of the step. For a penalty over all parameters "
    "(L1, EWC) add its gradient before the optimizer steps, as in a callback's on_optimizer_step: "
    "parameter.grad.add_(parameter.sign(), alpha=...)"
)


def refuse_direct(_gradient: Tensor) -> None:
    """Raise an error for a gradient of a shard itself, and not of the gathered parameter.

    It would count this rank's share of the batch only, while other gradients are averaged over all ranks.
    """
    raise StepError(SHARDS_ALONE)


# -- The parameter whose place a shard has taken --------------------------------------------------


class ReplacedParameter(nn.Parameter):
    """A user's parameter whose place in the model a shard has taken; whatever uses it is refused.

    It has no values any more, so that its memory is free. A penalty over a list of parameters that was made
    before would be 0, and a change of them would reach no model.
    """

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is Tensor.__hash__:  # optimizers have it as a key
            return id(args[0])
        leaves = tree_leaves([list(args), kwargs or {}])
        names = [vars(leaf)["tp_name"] for leaf in leaves if type(leaf) is cls]
        # it may be within an object that is no container
        if names:
            name = repr(names[0])
        else:
            name = "one"
        msg = (
            f"this parameter was {name} of a model until the model was prepared; a shard "
            "has taken its place, and this one has no values any more. Take it from the model again, after "
            "prepare() or in a callback: model.parameters(), model.get_parameter(name). An optimizer that "
            "has it is given to trainer.prepare(model, optimizer) or fit()"
        )
        raise StepError(msg)


def retire(parameter: nn.Parameter, name: str) -> None:
    """Free the memory of a parameter that has been replaced, and refuse what uses it from now on."""
    parameter.grad = None
    parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
    if type(parameter) is nn.Parameter:
        vars(parameter)["tp_name"] = name
        # As torch does it with parameters of lazy modules: an object in the user's hands changes its class.
        parameter.__class__ = ReplacedParameter


def share_attributes(fsdp_param: Any) -> None:
    """Make the gathered parameter have the attributes of its shard, also those that are set later.

    Private to torch: no public hook sees the gathered parameter, which is made with the first gathering.
    """
    make = fsdp_param.init_unsharded_param

    def make_and_share() -> None:
        make()
        attributes = vars(fsdp_param.sharded_param)
        if vars(fsdp_param._unsharded_param) is not attributes:
            fsdp_param._unsharded_param.__dict__ = attributes

    fsdp_param.init_unsharded_param = make_and_share


# -- Hooks on gradients ---------------------------------------------------------------------------


class GradientHooks:
    """Calls a user's hooks on the gradient of one parameter with the gradient over all ranks.

    torch would call none of them for a shard, and for a parameter that each rank holds whole it would call
    them before the gradient is averaged. They are called as on one device: those of ``register_hook`` with
    the gradient of one backward pass, then those of ``register_post_accumulate_grad_hook`` with the
    parameter, once the gradient is in its ``grad``.

    Hooks that were on the parameter before it was sharded get whole tensors, and so do those that a step puts
    on the gathered parameter. Those that were put on the shard get DTensors.

    Args:
        name: The parameter's name.
        parameter: The shard, or the parameter that each rank holds whole.
        tensor_hooks: The hooks of ``register_hook`` that were on it before.
        accumulated_hooks: The hooks of ``register_post_accumulate_grad_hook`` that were on it before.

    Attributes:
        parameter: The same parameter.

    Collective: for hooks from before, an all-gather of the gradient, and of the parameter.
    """

    def __init__(
        self, name: str, parameter: nn.Parameter, tensor_hooks: Hooks, accumulated_hooks: Hooks
    ) -> None:
        self._name = name
        self.parameter: Any = parameter
        self._tensor_hooks = [tensor_hooks] if tensor_hooks else []
        if accumulated_hooks:
            self._accumulated_hooks = [accumulated_hooks]
        else:
            self._accumulated_hooks = []
        self._kept: Tensor | None = None  # what earlier backward passes have accumulated
        self._is_in_backward = False
        self._listens = False

    def exist(self) -> bool:
        """Return whether there are any hooks now."""
        if any(self._accumulated_hooks) or any(self._tensor_hooks):  # a handle may have removed them
            return True
        return bool(self.parameter._backward_hooks and self._later())

    def take_from(self, gathered: nn.Parameter) -> None:
        """Take the hooks that a step has put on the gathered parameter.

        torch would call them with the gradient of this rank's share.
        """
        if any(hook is drop_gradient for hook in (gathered._backward_hooks or {}).values()):
            return  # this rank's loss counts nothing: others have no such hook, and would not meet in it
        tensor_hooks, accumulated_hooks = take_gradient_hooks(gathered)
        self._tensor_hooks = [hooks for hooks in (*self._tensor_hooks, tensor_hooks) if hooks]
        self._accumulated_hooks = [hooks for hooks in (*self._accumulated_hooks, accumulated_hooks) if hooks]

    def _later(self) -> list[Callable[..., Any]]:
        """Return the hooks of ``register_hook`` that were put on a shard, which torch never calls."""
        if not is_dtensor(self.parameter):  # torch calls them
            return []
        hooks = self.parameter._backward_hooks or {}
        return [hook for hook in hooks.values() if hook is not refuse_direct]

    def listen(self) -> None:
        """Have torch call these hooks, before the accumulated ones that are put on later."""
        parameter = self.parameter
        if not self._listens and parameter.requires_grad:  # torch refuses hooks of a frozen one
            handle = parameter.register_post_accumulate_grad_hook(self._weak_call())
            if is_dtensor(parameter):  # otherwise after the average
                hooks: Any = parameter._post_accumulate_grad_hooks  # an OrderedDict
                hooks.move_to_end(handle.id, last=False)
            self._listens = True
        hooks = parameter._backward_hooks
        if not hooks or is_dtensor(parameter):
            return
        if any(hook is drop_gradient for hook in hooks.values()):
            return  # this rank has no sample: its part is 0 before the average, and in this pass alone
        # torch would call them before the average.
        self._tensor_hooks.append(hooks)
        parameter._backward_hooks = None

    def _weak_call(self) -> Callable[[Any], None]:
        """Return `_call` without a reference to this object, which has the parameter.

        The garbage collector does not look into torch's hooks of a parameter: a cycle would never be freed.
        """
        reference = weakref.ref(self)

        def call(parameter: Any) -> None:
            hooks = reference()
            if hooks is not None:
                hooks._call(parameter)

        return call

    def begin(self) -> None:
        """Put the accumulated gradient aside: hooks see the one of this backward pass alone."""
        self._kept, self.parameter.grad = self.parameter.grad, None
        self._is_in_backward = True

    def end(self) -> None:
        self._is_in_backward = False
        kept, self._kept = self._kept, None
        if kept is not None and self.parameter.grad is None:  # no gradient came
            self.parameter.grad = kept

    @torch.no_grad()
    def _call(self, parameter: Any) -> None:
        if not self.exist():
            return
        if not self._is_in_backward:
            msg = (
                f"{self._name!r} has a gradient hook, and is fully sharded: call trainer.backward(loss) in "
                "place of loss.backward(), so that the hook gets the gradient over all ranks"
            )
            raise StepError(msg)
        gradient = parameter.grad
        if any(self._tensor_hooks):
            changed = whole(gradient).clone()
            for hooks in self._tensor_hooks:
                changed = self._result_of(list(hooks.values()), changed)
            fill_from_whole(gradient, changed)
        if later := self._later():
            mesh, placements = gradient.device_mesh, gradient.placements
            gradient = self._result_of(later, gradient).redistribute(mesh, placements)
        kept, self._kept = self._kept, None
        if kept is None:
            parameter.grad = gradient
        else:
            parameter.grad = kept.add_(gradient)
        if any(self._accumulated_hooks):
            self._call_accumulated(parameter)

    def _result_of(self, hooks: Sequence[Callable[..., Any]], gradient: Any) -> Any:
        """Return a gradient as hooks of ``register_hook`` change it."""
        kind, shape = type(gradient), gradient.shape
        for hook in hooks:
            try:
                result = hook(gradient)
            except RuntimeError as error:
                if "mixed torch.Tensor and DTensor" not in str(error):  # torch has no class for it
                    raise
                raise StepError(self._mixed()) from error
            if result is None:
                continue
            if is_dtensor(gradient) and not is_dtensor(result):
                raise StepError(self._mixed())
            if result.shape != shape:
                msg = (
                    f"a gradient hook of {self._name!r} returned {kind.__name__} of shape "
                    f"{tuple(result.shape)} for one of {tuple(shape)}"
                )
                raise StepError(msg)
            gradient = result
        return gradient

    def _mixed(self) -> str:
        return (
            f"a gradient hook that was put on the shard of {self._name!r} computes with a plain tensor "
            "beside the gradient, which is a DTensor over all ranks, as the parameter is. Put the hook on "
            "before the model is prepared, or in on_setup: then it gets the whole gradient. Or make its "
            "tensors from the parameter, torch.ones_like(parameter)"
        )

    def _call_accumulated(self, parameter: Any) -> None:
        """Call hooks with a whole parameter and its whole gradient, and keep what they change in them."""
        stand_in = nn.Parameter(whole(parameter.detach()).clone())
        copy_attributes(parameter, stand_in)
        stand_in.grad = whole(parameter.grad).clone()
        for hooks in self._accumulated_hooks:
            for hook in list(hooks.values()):
                hook(stand_in)
        fill_from_whole(parameter.detach(), stand_in.detach())
        if stand_in.grad is None:
            parameter.grad = None
        else:
            fill_from_whole(parameter.grad, stand_in.grad)


# -- Assignments to `.data` -----------------------------------------------------------------------


class AssignmentWatch:
    """A check that nobody has assigned to the ``data`` of a shard: torch computes with the old values.

    ``parameter.data = values`` replaces the outer tensor of a DTensor, and leaves the local one, which has
    the values. So the values are lost at once, and what can be seen is the storage of the outer tensor.

    Args:
        model: The model, sharded.
    """

    def __init__(self, model: nn.Module) -> None:
        self._places = [
            (f"{prefix}.{name}".lstrip("."), inner._parameters, name)
            for prefix, inner in model.named_modules()
            for name, parameter in inner._parameters.items()
            if parameter is not None
        ]
        # The storage is kept, as a later one could have the address of a freed one; it has no memory.
        self._seen: dict[int, tuple[Any, Any, Any]] = {}
        self.check()

    def check(self) -> None:
        """Raise if the ``data`` of a shard was replaced since the last check.

        Raises:
            StepError: That of a parameter was, which is named.
        """
        for index, (name, row, key) in enumerate(self._places):
            parameter: Any = row.get(key)
            if parameter is None or not is_dtensor(parameter):  # gathered at present
                continue
            storage, spec = parameter.untyped_storage(), parameter._spec
            before = self._seen.get(index)
            self._seen[index] = parameter, storage, spec
            if before is None or before[0] is not parameter or before[2] is not spec:
                continue  # another parameter, or a converted one, as by load_state_dict and by .to()
            if before[1]._cdata != storage._cdata:
                msg = (
                    f"the data of the parameter {name!r} was replaced (parameter.data = ...). A fully "
                    "sharded parameter keeps the values that it had, and these are lost. Write them in "
                    "place: parameter.data.copy_(values). To put weights back later, keep a copy of them, "
                    "parameter.data.clone(), as parameter.data is no copy"
                )
                raise StepError(msg)
