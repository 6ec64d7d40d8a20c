"""Activation checkpointing: which modules compute their activations again, and what they keep."""

import functools
import re
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from tp_core.errors import ConfigError, ModelError
from tp_core.jobs import Recomputation
from tp_core.messages import those_known
from tp_core.modules import Mixin, mix_in, repeated_blocks, without_cache

Keep = Literal["inputs", "matmuls"]
"""What a module keeps for its backward pass: its inputs, or the results of matrix products too."""

# By their names, of which those of attention are private and differ by device. A convolution is one of them.
_MATMULS = re.compile(
    r"aten\.(mm|addmm|bmm|baddbmm|_scaled_mm|_grouped_mm|convolution|_scaled_dot_product_\w*attention\w*"
    r"|_flash_attention_forward|_efficient_attention_forward)\.|flex_attention"
)


class _Checkpointed(Mixin):
    """Computes the forward pass of a module again in its backward pass."""

    options: ClassVar[dict[str, Any]] = {"use_reentrant": False}

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        forward = super().forward  # type: ignore[misc]  # of the module's own class
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        args = tuple(without_cache(self, value) for value in args)
        kwargs = {name: without_cache(self, value) for name, value in kwargs.items()}
        return checkpoint(forward, *args, **self.options, **kwargs)


class _CheckpointedButProducts(_Checkpointed):
    """Keeps the results of matrix products, too."""

    options: ClassVar[dict[str, Any]] = {
        "use_reentrant": False,
        "context_fn": lambda: create_selective_checkpoint_contexts(_policy),
    }


def checkpoint_activations(
    model: nn.Module, *kinds: type[nn.Module] | str, every: int = 1, keep: Keep = "inputs"
) -> None:
    """Compute the activations of some modules again in the backward pass, instead of storing them.

    It trades a second forward pass of these modules for memory. Call it before the model is prepared, on
    every rank. The numbers are the same, also with dropout; names, parameters and checkpoints do not change.
    For the units of ``fsdp`` there is also ``FsdpOptions(activation_checkpointing=True)``.

    Args:
        model: The model; its modules are changed in place.
        *kinds: Classes of its modules, or their names: ``nn.TransformerEncoderLayer``, ``"GPT2Block"``.
            Without any they are the model's blocks: those that a model of Hugging Face names in
            ``_no_split_modules``, else those that repeat.
        every: Only every n-th of these modules, from the first one on: with 2 every second one.
        keep: "inputs" keeps the inputs of a module alone, for about a third more time. "matmuls" also keeps
            the results of matrix products, convolutions and attention: about half the memory, for a few
            percent of the time. A module may not change such a result in place then; torch raises an error.

    A model of Hugging Face gets no cache of keys and values for these modules in training, even if its
    ``use_cache`` is true: their second forward pass would append to it.

    Raises:
        ModelError: The model has no module of a class, or no blocks; in a step, a module gets a cache that is
            not empty.
        ConfigError: An argument has another value.

    Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016; for "matmuls" Korthikanti
    et al., "Reducing Activation Recomputation in Large Transformer Models", 2022, section 5.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
        >>> checkpoint_activations(model, nn.Linear)
        >>> list(model.state_dict())
        ['0.weight', '0.bias']
    """
    if not all(isinstance(kind, str | type) for kind in kinds):
        msg = f"checkpoint_activations() needs classes of modules, or their names, got {kinds!r}"
        raise ConfigError(msg)
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        msg = f"every must be a whole number from 1, got {every!r}"
        raise ConfigError(msg)
    if keep not in ("inputs", "matmuls"):
        msg = f"keep must be 'inputs' or 'matmuls', got {keep!r}"
        raise ConfigError(msg)
    if kinds:
        chosen = _modules_of(model, kinds)
    else:
        chosen = list(repeated_blocks(model).values())
    for module in chosen[::every]:
        if not isinstance(module, _Checkpointed):
            if keep == "inputs":
                mixin = _Checkpointed
            else:
                mixin = _CheckpointedButProducts
            mix_in(mixin, module)


def _modules_of(model: nn.Module, kinds: Sequence[type[nn.Module] | str]) -> list[nn.Module]:
    matching: dict[nn.Module, None] = {}
    for kind in kinds:
        modules = [m for m in model.modules() if _is_of(m, kind)]
        if not modules:
            names = sorted({type(module).__name__ for module in model.modules()})
            name = kind if isinstance(kind, str) else kind.__name__
            msg = f"the model has no module of the class {name!r}{those_known(name, names)}"
            raise ModelError(msg)
        matching |= dict.fromkeys(modules)
    return [module for module in model.modules() if module in matching]


def _is_of(module: nn.Module, kind: type[nn.Module] | str) -> bool:
    if isinstance(kind, str):
        return type(module).__name__ == kind
    return isinstance(module, kind)


def _policy(_context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    if _is_matmul(operator):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


@functools.cache
def _is_matmul(operator: Any) -> bool:
    return _MATMULS.match(str(operator)) is not None


# -- The least recomputation with which a job fits ------------------------------------------------


_CHECKPOINTING: dict[Recomputation, dict[str, Any]] = {
    "nothing": {},
    "all but matmuls": {"keep": "matmuls"},
    "every 2nd block": {"every": 2},
    "every block": {"every": 1},
}


def recomputations(model: nn.Module) -> list[Recomputation]:
    """Return what can be computed again in a model: from the least time to the least memory."""
    try:
        repeated_blocks(model)
    except ModelError:
        return ["nothing"]
    return list(_CHECKPOINTING)


def recompute(model: nn.Module, recomputation: Recomputation | None) -> None:
    """Checkpoint a model's activations so; a model without blocks, such as a second one, stays as it is."""
    if recomputation not in (None, "nothing") and len(recomputations(model)) > 1:
        checkpoint_activations(model, **_CHECKPOINTING[recomputation])
