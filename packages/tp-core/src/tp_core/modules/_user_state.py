"""What a user hung on a parameter: attributes and gradient hooks, where another parameter takes its place."""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from tp_core._first_party import is_users_hook

_TORCHS_OWN = frozenset({"_is_param", "_fsdp_orig_uid"})
"""Attributes that torch sets on a parameter for itself."""

Hooks = Mapping[int, Callable[..., Any]]
"""Hooks as torch keeps them: a handle removes its hook from this very object."""


def copy_attributes(source: Tensor, target: Tensor) -> None:
    """Set the attributes of a parameter on the one that takes its place.

    Libraries mark parameters by attributes, for example ``_no_weight_decay`` (Mamba, S4) and ``infshape``
    (muP), and read them when the optimizer is made.

    Example:
        >>> source, target = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(1))
        >>> source.decays = False
        >>> copy_attributes(source, target)
        >>> target.decays
        False
    """
    vars(target).update(attributes_of(source))


def attributes_of(parameter: Tensor) -> dict[str, Any]:
    """Return the attributes that users and libraries have set on a parameter."""
    return {name: value for name, value in vars(parameter).items() if name not in _TORCHS_OWN}


def move_gradient_hooks(source: Any, target: Any) -> None:
    """Give the gradient hooks of a parameter to the one of the same shape that takes its place.

    Both kinds move: those of ``register_hook``, and those of ``register_post_accumulate_grad_hook``. Their
    handles stay valid.
    """
    tensor_hooks, accumulated_hooks = take_gradient_hooks(source)
    # torch itself keeps them in these attributes, which have setters; there is no public way to move one.
    if tensor_hooks:
        target._backward_hooks = tensor_hooks
    if accumulated_hooks:
        target._post_accumulate_grad_hooks = accumulated_hooks


def take_gradient_hooks(parameter: Any) -> tuple[Hooks, Hooks]:
    """Remove the gradient hooks of a parameter, and return them: of tensors, and of accumulated gradients."""
    tensor_hooks: Hooks = parameter._backward_hooks or {}
    accumulated_hooks: Hooks = parameter._post_accumulate_grad_hooks or {}
    if tensor_hooks:
        parameter._backward_hooks = None
    if accumulated_hooks:
        # Not None: torch then forgets them in Python, and calls them all the same (2.13).
        parameter._post_accumulate_grad_hooks = OrderedDict()
    return tensor_hooks, accumulated_hooks


def has_gradient_hooks(parameter: Any) -> bool:
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def hooked_parameters(model: nn.Module) -> list[str]:
    """Return the names of the parameters on whose gradients a user has put hooks."""
    return [name for name, parameter in model.named_parameters() if has_gradient_hooks(parameter)]


def has_users_hooks(parameter: Any) -> bool:
    """Return whether hooks of the user's, of either kind, see the gradient of a parameter."""
    for hooks in (parameter._backward_hooks, parameter._post_accumulate_grad_hooks):
        if hooks and any(map(is_users_hook, hooks.values())):
            return True
    return False
