"""Random streams of replicas, and the functions of torch that draw random numbers."""

import hashlib
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any, Self, cast

import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from tp_core.device_types import is_capturing
from tp_core.errors import ModelError
from tp_core.modules._compiler import not_compiled_alone, untraced
from tp_core.random import device_rng_state, set_device_rng_state

# -- Torch's functions that draw random numbers ---------------------------------------------------


_ALWAYS = """
torch: bernoulli binomial multinomial normal poisson rand rand_like randint randint_like randn
    randn_like randperm dropout dropout_ native_dropout alpha_dropout alpha_dropout_
    feature_dropout feature_dropout_ feature_alpha_dropout feature_alpha_dropout_ rrelu rrelu_
F: dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout rrelu rrelu_
    gumbel_softmax fractional_max_pool2d fractional_max_pool3d
    fractional_max_pool2d_with_indices fractional_max_pool3d_with_indices
Tensor: bernoulli bernoulli_ cauchy_ exponential_ geometric_ log_normal_ multinomial normal_
    random_ uniform_
"""
_SOMETIMES = """
torch: lstm gru rnn_tanh rnn_relu
F: scaled_dot_product_attention multi_head_attention_forward
"""
_INSIDE = """
torch: _standard_gamma _sample_dirichlet _fused_dropout _fill_mem_eff_dropout_mask_
    _cudnn_init_dropout_state _cudnn_rnn _lstm_mps miopen_rnn
    _scaled_dot_product_attention_math _scaled_dot_product_attention_math_for_mps
    _scaled_dot_product_cudnn_attention _scaled_dot_product_efficient_attention
    _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu
    _triton_scaled_dot_attention _flash_attention_forward_no_dropout_inplace
nn: rrelu_with_noise rrelu_with_noise_
"""
"""Operators behind functions that are not intercepted themselves, as in ``torch.distributions``."""

_HOMES: dict[str, Any] = {"torch": torch, "nn": torch._C._nn, "F": F, "Tensor": Tensor}


def _parse(table: str) -> frozenset[Callable[..., Any]]:
    functions = []
    home: Any = None
    for word in table.split():
        if word.endswith(":"):
            home = _HOMES[word[:-1]]
        elif hasattr(home, word):  # some are missing in some versions
            functions.append(getattr(home, word))
    return frozenset(functions)


_TAG = torch.Tag.nondeterministic_seeded
_RANDOM = _parse(_ALWAYS)
_RANDOM_INSIDE = _parse(_INSIDE)
_MAYBE_RANDOM = _parse(_SOMETIMES)
_RATE = frozenset({"dropout", "dropout_p"})


def is_random_op(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> bool:
    """Return whether the call draws from the default generator of a device."""
    # While compiling, the first table alone: the compiler takes functions of the others as a whole.
    if function in _RANDOM or (not torch.compiler.is_compiling() and _is_random_inside(function)):
        return kwargs is None or kwargs.get("generator") is None
    if function not in _MAYBE_RANDOM:
        return False
    # Recurrent layers and attention have a dropout rate: the one float above 0 among the
    # positional arguments, or a keyword.
    named = () if kwargs is None else [v for k, v in kwargs.items() if k in _RATE]
    return any(isinstance(v, float) and v > 0 for v in (*args, *named))


def _is_random_inside(function: Callable[..., Any]) -> bool:
    """Return whether it is a private operator of the table, or an operator that is tagged as random."""
    if isinstance(function, OpOverloadPacket):
        names: list[str] = function.overloads()
        return any(_TAG in getattr(function, name).tags for name in names)
    if isinstance(function, OpOverload):
        return _TAG in function.tags
    return function in _RANDOM_INSIDE


# -- Random streams -------------------------------------------------------------------------------
# Replica 0 draws from its device's generator, as the plain module would. Every other replica draws
# from a stream that follows from that generator's state at the beginning of the call and from the
# replica's number. So one seed gives one result, whatever the threads' timing, and no two replicas
# drop the same units.
#
# torch has one default generator per device, shared by all threads. Where a replica is alone on its
# accelerator, that generator is seeded during the call. Where replicas share one (the CPU's is always
# shared), each drawing function runs alone, under a lock, with the replica's state in the generator.
#
# An activation checkpoint saves the generator's state before its forward, and draws from it again in
# backward. That is right for a replica that is alone on its device. A shared generator has another state
# between the draws than the replica's: the checkpoint would save that one, and draw other numbers. So
# draws within a checkpoint are refused there.


_CPU = torch.device("cpu")


class HiddenGenerator:
    """The default generator of a device whose module in torch has functions for its state and no object."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def get_state(self) -> Tensor:
        return device_rng_state(self.device)

    def set_state(self, state: Tensor) -> None:
        set_device_rng_state(self.device, state)

    def manual_seed(self, seed: int) -> None:
        self.set_state(torch.Generator(self.device).manual_seed(seed).get_state())


class Streams:
    """The random streams of the replicas during one call.

    Attributes:
        lock: The lock that a replica holds while it draws: a generator has one state for all threads.
        has_drawn: Whether a replica other than 0 drew a number.
    """

    def __init__(self, devices: tuple[torch.device, ...]) -> None:
        self._devices = devices
        self._home = _generator(devices[0])
        self._start: Tensor | None = None
        self._is_shared = _are_shared(devices)
        if not all(self._is_shared):
            self.note_start()  # a replica alone on its device draws without the lock: it needs the start now
        self.lock = _drawing_lock()
        self.has_drawn = False

    def of(self, number: int) -> AbstractContextManager[Any]:
        """Return the context in which a replica draws from its stream."""
        generator = _generator(self._devices[number])
        if generator is None:
            return nullcontext()
        if self._is_shared[number]:
            return SerializedRng(self, generator, number)
        if number == 0:
            return nullcontext()
        return OwnRng(self, generator, number)

    def note_start(self) -> None:
        """Record the state at the call's beginning; call it before anything is drawn."""
        if self._start is None and self._home is not None:
            self._start = self._home.get_state()

    def close(self) -> None:
        """Advance the generator if only other replicas drew: the next call must not repeat their numbers."""
        if not self.has_drawn or self._home is None or self._start is None:
            return
        if torch.equal(self._start, self._home.get_state()):
            torch.rand((), device=self._devices[0])

    def seed(self, number: int) -> int:
        if self._start is None:
            state = b""
        else:
            state = self._start.numpy().tobytes()
        digest = hashlib.blake2b(state, digest_size=8, salt=number.to_bytes(8, "little"))
        return int.from_bytes(digest.digest()) >> 1  # torch takes a signed 64-bit seed


class SerializedRng(TorchFunctionMode):
    """A mode that runs random operations one at a time, with the replica's state in a shared generator."""

    def __init__(self, streams: Streams, generator: torch.Generator | HiddenGenerator, number: int) -> None:
        super().__init__()
        self._streams = streams
        self._generator = generator
        self._number = number
        self._state: Tensor | None = None

    def __enter__(self) -> Self:
        self._is_recording = torch.is_grad_enabled()  # without gradients nothing runs again
        self._hooks, self._is_within_function = saving_hooks(), _is_within_function()
        super().__enter__()  # type: ignore[no-untyped-call]  # torch's own
        return self

    @not_compiled_alone
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if not is_random_op(func, args, kwargs):
            return func(*args, **kwargs)
        with self._streams.lock:
            self._streams.note_start()
            if self._number == 0:
                return self._draw(func, args, kwargs)
            generator = self._generator
            saved = generator.get_state()
            if self._state is None:
                generator.manual_seed(self._streams.seed(self._number))
                self._state = generator.get_state()
            else:
                generator.set_state(self._state)
            began = self._state
            try:
                return self._draw(func, args, kwargs)
            finally:
                self._state = generator.get_state()
                # By the state: dropout draws nothing in evaluation, or at a rate of 0.
                if not self._streams.has_drawn:
                    self._streams.has_drawn = not torch.equal(began, self._state)
                generator.set_state(saved)

    def _draw(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not (self._is_recording and self._may_run_again(func)):
            return func(*args, **kwargs)
        generator = self._generator
        began = generator.get_state()
        result = func(*args, **kwargs)
        # By the state: dropout draws nothing in evaluation, or at a rate of 0.
        if not torch.equal(began, generator.get_state()):
            raise ModelError(_no_checkpoint(generator.device))
        return result

    @untraced
    def _may_run_again(self, func: Callable[..., Any]) -> bool:
        """Return whether backward may run this part of forward again, as an activation checkpoint does.

        One with ``use_reentrant=False`` saves tensors by hooks of its own. Others, those of other libraries
        too, are the forward of a ``torch.autograd.Function``.
        """
        if self._hooks != saving_hooks():
            return True
        # torch.distributions draws it in a function of its own, which does not run again.
        is_exempt = func is torch._sample_dirichlet
        return not is_exempt and _is_within_function() is not self._is_within_function


def saving_hooks() -> Any:
    """Return the innermost hooks for saved tensors in this thread, or ``None``."""
    # Private, and so is the next: torch has public ways to set both, and none to ask for them.
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def _is_within_function() -> bool:
    """Return whether this thread is in the forward of a ``torch.autograd.Function``."""
    # torch turns forward-mode gradients off there and in inference mode, and leaves them on under no_grad().
    return not torch._C._is_fwd_grad_enabled() and not torch.is_inference_mode_enabled()


def _no_checkpoint(device: torch.device) -> str:
    return (
        "random numbers are drawn within an activation checkpoint (or another autograd function, or hooks "
        f"for saved tensors) on {str(device)!r}, whose generator several replicas share: backward would draw "
        "other numbers; give each replica a device of its own, take a process for each ('ddp'), draw outside "
        "of the checkpoint, or leave it away on these devices"
    )


class OwnRng:
    """A context that seeds the generator of a replica that is alone on its accelerator."""

    def __init__(self, streams: Streams, generator: torch.Generator | HiddenGenerator, number: int) -> None:
        self._streams = streams
        self._generator = generator
        self._number = number

    def __enter__(self) -> None:
        self._saved = self._generator.get_state()
        self._generator.manual_seed(self._streams.seed(self._number))
        self._start = self._generator.get_state()

    def __exit__(self, *_: object) -> None:
        if not torch.equal(self._start, self._generator.get_state()):
            self._streams.has_drawn = True
        self._generator.set_state(self._saved)


@lru_cache(maxsize=64)
def _are_shared(devices: tuple[torch.device, ...]) -> tuple[bool, ...]:
    """Return for each device whether several replicas draw from its generator."""
    return tuple(d.type == "cpu" or devices.count(d) > 1 for d in devices)


def _drawing_lock() -> AbstractContextManager[Any]:
    """Return the lock that replicas hold while they draw.

    The compiler restores the generators' states after each compilation. A draw then would be undone,
    or a replica's state would stay in the generator. The compiler holds a lock as long, so replicas take the
    same one; torch has no public name for it.
    """
    compiler: Any = sys.modules.get("torch._dynamo.convert_frame")
    if compiler is None:
        return threading.Lock()
    return cast("AbstractContextManager[Any]", compiler.compile_lock)


def _generator(device: torch.device) -> torch.Generator | HiddenGenerator | None:
    """Return the default generator of a device; ``None`` on "meta", which draws nothing.

    ``None`` while a graph is captured, too: random numbers are then drawn at each replay.
    """
    if device == _CPU:  # comparing the types takes several times as long
        return torch.default_generator
    if device.type == "meta" or is_capturing(device):
        return None
    module = getattr(torch, device.type, None)
    generators: Any = getattr(module, "default_generators", None)
    if not generators or device.index is None:
        return HiddenGenerator(device)
    generator: torch.Generator = generators[device.index]
    return generator
