"""The masks that dropout draws, by the modules that draw them, and what it drops from."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from tp_core.compare import WithoutDropout, in_backward_pass
from tp_core.random import preserve_torch_rng_state
from tp_core.tensors import is_dtensor

_BY_ELEMENT = {"dropout", "dropout_", "alpha_dropout", "alpha_dropout_"}  # others drop whole channels
_BY_CHANCE = -27.0  # the logarithm of once in 500 billion


class DropoutCall(NamedTuple):
    """A call of a dropout function.

    Attributes:
        module: The name of the module that calls it.
        number: The number of the call in this module, from 0.
    """

    module: str
    number: int


class DropoutRecording(TorchFunctionMode):
    """A mode that notes what dropout functions get, and what they keep of it.

    Args:
        model: The model; hooks on its modules say which one calls.
        plain_name: A function from a module's name to the one to note.

    Attributes:
        inputs: What each call got.
        masks: Which elements each call kept.
    """

    def __init__(self, model: nn.Module, plain_name: Callable[[str], str | None]) -> None:
        super().__init__()
        self.inputs: dict[DropoutCall, Tensor] = {}
        self.masks: dict[DropoutCall, Tensor] = {}
        self._model, self._plain_name = model, plain_name
        self._handles: list[Any] = []
        self._running = [""]  # the names of the modules that run: the model, the innermost last
        self._calls: Counter[str] = Counter()
        self._draws = _Draws(self._running)

    def __enter__(self) -> Self:
        for name, module in self._model.named_modules():
            plain = self._plain_name(name) or ""
            self._handles.append(module.register_forward_pre_hook(partial(self._begin, plain)))
            # Also where an error ends it: a checkpoint stops its second pass by one.
            self._handles.append(module.register_forward_hook(self._end, always_call=True))
        super().__enter__()  # type: ignore[no-untyped-call]  # torch's own
        self._draws.__enter__()  # type: ignore[no-untyped-call]  # as above
        return self

    def __exit__(self, *error: object) -> None:
        self._draws.__exit__(*error)  # type: ignore[no-untyped-call]  # as above
        super().__exit__(*error)  # type: ignore[no-untyped-call]  # as above
        for handle in self._handles:
            handle.remove()

    def _begin(self, name: str, _module: nn.Module, _args: Any) -> None:
        self._running.append(name)

    def _end(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        self._running.pop()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in WithoutDropout.DROPOUTS:
            self._note(func, args, kwargs)
        return func(*args, **kwargs)

    def _note(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        given = args[0] if args else kwargs["input"]
        if is_dtensor(given) or not given.numel():  # a DTensor has a generator of its own
            return
        module = self._running[-1]
        call = DropoutCall(module, self._calls[module])
        self._calls[module] += 1
        self.inputs[call], self.masks[call] = given.detach().clone(), _mask(func, given, args, kwargs)

    def redrawn(self) -> list[str]:
        """Return the modules that draw otherwise where the backward pass computes them again."""
        drawn = self._draws.drawn
        return [
            module
            for module, again in self._draws.again
            if not any(torch.equal(again, mask) for mask in drawn)
        ]


class _Draws(TorchDispatchMode):
    """A mode that notes what is drawn, also within attention, and in backward passes.

    A mode of functions is off while it handles ``Tensor.backward``.

    Attributes:
        drawn: What the forward pass draws.
        again: What is drawn where the backward pass computes the forward pass again, with the module.
    """

    _DRAWS = (torch.ops.aten.bernoulli_, torch.ops.aten.bernoulli, torch.ops.aten.native_dropout)

    def __init__(self, running: Sequence[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self.drawn: list[Tensor] = []
        self.again: list[tuple[str, Tensor]] = []
        self._running = running

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in self._DRAWS:
            mask = result[1] if isinstance(result, tuple) else result
            if in_backward_pass():
                self.again.append((self._running[-1], mask.detach().clone()))
            else:
                self.drawn.append(mask.detach().clone())
        return result


def _mask(func: Any, given: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """Return what a call is about to keep, drawn in advance for a tensor of ones."""
    ones = torch.ones_like(given, requires_grad=False)
    with preserve_torch_rng_state(()), torch.no_grad():
        if args:
            dropped = func(ones, *args[1:], **kwargs)
        else:
            dropped = func(**{**kwargs, "input": ones})
    kept: Tensor = dropped == dropped.max()
    if func.__name__ not in _BY_ELEMENT and kept.dim() > 1:
        kept = kept.flatten(min(2, kept.dim() - 1))[..., 0]
    return kept


def draw_the_same(
    one: Sequence[Mapping[DropoutCall, Tensor]],
    other: Sequence[Mapping[DropoutCall, Tensor]],
    call: DropoutCall,
) -> bool | None:
    """Return whether two ranks draw the same masks in a call; ``None`` where they may do so by chance.

    Of unequally many elements the first are compared: these are the same after one seed.

    Args:
        one: The masks of a rank, for each seed.
        other: Those of another rank.
        call: The call.
    """
    chance = 0.0
    for mine, theirs in zip(one, other, strict=True):
        if call not in mine or call not in theirs:
            return None
        count = min(mine[call].numel(), theirs[call].numel())
        kept = mine[call].flatten()[:count]
        if not torch.equal(kept, theirs[call].flatten()[:count]):
            return False
        share = float(kept.double().mean())
        chance += count * math.log(share**2 + (1 - share) ** 2)
    if chance < _BY_CHANCE:
        return True
    return None
