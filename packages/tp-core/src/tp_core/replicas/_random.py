"""Random streams of replicas, and the caller's per-thread settings in the replicas' threads."""

import hashlib
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import Context, copy_context
from functools import lru_cache, partial
from types import FrameType, GeneratorType
from typing import Any, NamedTuple, cast

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch._ops import OpOverload, OpOverloadPacket
from torch.autograd.graph import disable_saved_tensors_hooks, saved_tensors_hooks
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from tp_core.errors import ModelError
from tp_core.replicas._compiler import not_compiled_alone

# -- Random numbers in activation checkpoints -----------------------------------------------------
# ``torch.utils.checkpoint`` saves the generator's state before a forward, to draw the same numbers again
# when it repeats that forward in backward. A replica that shares the generator has a state of its own,
# which is in the generator only while it draws. So the saved state is replaced by the replica's own, when
# the replica first draws inside of the checkpoint. torch keeps it in a local variable of functions on the
# stack; where it no longer does, we raise an error: the gradients would be wrong.
#
# Backward must come after the replicas' call, as it does in training. A backward inside of a replica's own
# call would draw at the same time as other replicas, without any lock.


_FILE = torch.utils.checkpoint.__file__
_ASKED = "preserve_rng_state"


def correct_checkpoints(generator: torch.Generator) -> None:
    """Put the generator's state into the enclosing checkpoints that do not have it yet."""
    frame: FrameType | None = sys._getframe(1)
    is_found = False  # the state that the checkpoint saved, in a frame that it called
    while frame is not None:
        if frame.f_code.co_filename == _FILE:
            noted = _noted_by(frame)
            if noted is not None:
                _correct(noted, generator)
            is_found = is_found or noted is not None
            if frame.f_code.co_name == "checkpoint":
                if not is_found:
                    raise _moved(_ASKED)
                is_found = False
        frame = frame.f_back


def _noted_by(frame: FrameType) -> dict[str, Any] | None:
    """Return the values that a checkpoint's function saved before the forward, by their names in torch."""
    variables = frame.f_locals
    if frame.f_code.co_name == "forward" and "ctx" in variables:
        noted: dict[str, Any] = vars(variables["ctx"])
        return noted
    steps = variables.get("gen")  # a local of whichever function runs the checkpoint's generator
    if isinstance(steps, GeneratorType) and steps.gi_frame is not None and steps.gi_code.co_filename == _FILE:
        return steps.gi_frame.f_locals
    return None


def _correct(noted: dict[str, Any], generator: torch.Generator) -> None:
    if _ASKED not in noted:
        raise _moved(_ASKED)
    if not noted[_ASKED]:
        return
    device = generator.device
    key = "fwd_cpu_state"
    states: list[Any] = [noted.get(key)]
    if device.type != "cpu":
        key = "fwd_device_states"
        pairs = zip(noted.get("fwd_devices", ()), noted.get(key, ()), strict=True)
        states = [state for index, state in pairs if index == device.index]
    for state in states:
        if not isinstance(state, Tensor):
            raise _moved(key)
        if not hasattr(state, "tp_is_corrected"):
            state.copy_(generator.get_state())
            state.tp_is_corrected = True  # type: ignore[attr-defined]


def _moved(key: str) -> ModelError:
    return ModelError(
        f"this version of torch ({torch.__version__}) does not keep a checkpoint's random state in "
        f"{key!r}, and replicas on one device would draw other numbers in backward; use one device"
    )


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
    found = []
    home: Any = None
    for word in table.split():
        if word.endswith(":"):
            home = _HOMES[word[:-1]]
        elif hasattr(home, word):  # some are missing in some versions
            found.append(getattr(home, word))
    return frozenset(found)


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
# Activation checkpoints get that state, to draw from it again in backward.


_CPU = torch.device("cpu")


class Streams:
    """The random streams of the replicas during one call.

    Attributes:
        lock: The lock that a replica holds while it draws: a generator has one state for all threads.
        has_drawn: Whether a replica other than 0 drew a number.
    """

    def __init__(self, devices: tuple[torch.device, ...]) -> None:
        self._home = _generator(devices[0])
        self._start: Tensor | None = None
        self._is_shared = _are_shared(devices)
        if not all(self._is_shared):
            self.note_start()  # a replica alone on its device draws without the lock: it needs the start now
        self.lock = _drawing_lock()
        self._devices = devices
        self.has_drawn = False

    def of(self, number: int) -> AbstractContextManager[Any]:
        generator = _generator(self._devices[number])
        if generator is None:
            return nullcontext()
        if self._is_shared[number]:
            return SerializedRng(self, generator, number)
        return nullcontext() if number == 0 else OwnRng(self, generator, number)

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
        state = b"" if self._start is None else self._start.numpy().tobytes()
        digest = hashlib.blake2b(state, digest_size=8, salt=number.to_bytes(8, "little"))
        return int.from_bytes(digest.digest()) >> 1  # torch takes a signed 64-bit seed


class SerializedRng(TorchFunctionMode):
    """A mode that runs random operations one at a time, with the replica's state in a shared generator."""

    def __init__(self, streams: Streams, generator: torch.Generator, number: int) -> None:
        super().__init__()
        self._streams = streams
        self._generator = generator
        self._number = number
        self._state: Tensor | None = None

    @not_compiled_alone
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if not is_random_op(func, args, kwargs):
            return func(*args, **kwargs) if kwargs else func(*args)
        kwargs = kwargs or {}
        generator = self._generator
        with self._streams.lock:
            self._streams.note_start()
            if self._number == 0:
                correct_checkpoints(generator)
                return func(*args, **kwargs)
            saved = generator.get_state()
            if self._state is None:
                generator.manual_seed(self._streams.seed(self._number))
                self._streams.has_drawn = True
            else:
                generator.set_state(self._state)
            try:
                correct_checkpoints(generator)
                return func(*args, **kwargs)
            finally:
                self._state = generator.get_state()
                generator.set_state(saved)


class OwnRng:
    """A context that seeds the generator of a replica that is alone on its accelerator."""

    def __init__(self, streams: Streams, generator: torch.Generator, number: int) -> None:
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

    The compiler restores the generators' states after each compilation. A draw meanwhile would be undone,
    or a replica's state would stay in the generator. The compiler holds a lock meanwhile, so replicas take
    the same one; torch has no public name for it.
    """
    compiler: Any = sys.modules.get("torch._dynamo.convert_frame")
    return (
        threading.Lock() if compiler is None else cast("AbstractContextManager[Any]", compiler.compile_lock)
    )


def _generator(device: torch.device) -> torch.Generator | None:
    """Return the default generator of a device, or ``None`` where torch does not expose it.

    It does not while a CUDA graph is captured: random numbers are then drawn at each replay.
    """
    if device == _CPU:  # comparing the types takes several times as long
        return torch.default_generator
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return None
    module = getattr(torch, device.type, None)
    generators: Any = getattr(module, "default_generators", None)
    if not generators or device.index is None:
        return None
    generator: torch.Generator = generators[device.index]
    return generator


# -- Settings of the caller's thread --------------------------------------------------------------


class Caller(NamedTuple):
    """The settings that torch and Python keep per thread, of the thread that calls the replicas.

    Attributes:
        grad: Whether gradients are recorded.
        inference: Whether inference mode is on.
        num_threads: Threads of one operation on the CPU.
        variables: The context variables.
        has_modes: Whether a mode or a transform of torch.func is active in this thread: `has_modes`.
        contexts: Functions from a replica's device to a context for its call; empty where no other
            setting is in use.
    """

    grad: bool
    inference: bool
    num_threads: int
    variables: Context
    has_modes: bool
    contexts: Sequence[Callable[[torch.device], AbstractContextManager[Any]]]

    @classmethod
    def capture(cls, devices: tuple[torch.device, ...], types: tuple[str, ...]) -> "Caller":
        """Read the settings of this thread."""
        contexts: list[Callable[[torch.device], AbstractContextManager[Any]]] = []
        if types != ("cpu",):
            streams = {d: torch.accelerator.current_stream(d) for d in devices if d.type != "cpu"}
            contexts.append(partial(on_streams, streams))
        inference = torch.is_inference_mode_enabled()
        if inference:
            contexts.append(lambda _: torch.inference_mode())
        for kind in types:
            if torch.is_autocast_enabled(kind):
                contexts.append(_autocast(kind))
        # Private: torch has public ways to set these hooks and modes, and none to ask for them.
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if hooks is not None:
            contexts.append(lambda _: saved_tensors_hooks(*hooks))
        refusal = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()
        if refusal is not None:
            contexts.append(lambda _: disable_saved_tensors_hooks(refusal))
        has_function_modes = torch._C._len_torch_function_stack() > 0
        if has_function_modes:  # a default device is one
            default = torch.empty(0).device  # torch.get_default_device() takes four times as long
            if default.type != "cpu":
                # The caller's own device becomes the replica's; any other stays.
                contexts.append(lambda device: device if default == devices[0] else default)
        return cls(
            torch.is_grad_enabled(),
            inference,
            torch.get_num_threads(),
            copy_context(),
            has_modes(),
            contexts,
        )

    def call(
        self,
        function: Callable[[nn.Module, Any], Any],
        replica: nn.Module,
        part: Any,
        *,
        device: torch.device,
        rng: AbstractContextManager[Any],
    ) -> Any:
        """Return ``function(replica, part)``, run in this thread with the caller's settings."""
        # These two stay set in our threads between calls: a context for each call would cost more.
        if torch.is_grad_enabled() is not self.grad:
            torch.set_grad_enabled(self.grad)
        if torch.get_num_threads() != self.num_threads:
            torch.set_num_threads(self.num_threads)
        variables = self.variables.copy()  # a context cannot be entered twice at once
        if not self.contexts:
            with rng:
                return variables.run(function, replica, part)
        with rng, ExitStack() as stack:
            for context in self.contexts:
                stack.enter_context(context(device))
            return variables.run(function, replica, part)


def _autocast(kind: str) -> Callable[[torch.device], AbstractContextManager[Any]]:
    """Return a function that makes contexts with this thread's autocast of a device type."""
    dtype = torch.get_autocast_dtype(kind)
    return lambda _: _in_autocast(kind, dtype)


@contextmanager
def _in_autocast(kind: str, dtype: torch.dtype) -> Iterator[None]:
    """Run a block under autocast without its cache of lowered weights, which all threads share.

    Replicas that share weights would use an entry that another one made, and ``torch.autocast`` empties
    the cache at its end. The rounding of gradients would depend on the threads' timing. Weights that are
    copies never enter the cache.
    """
    enabled, before = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_enabled(kind, True)
    torch.set_autocast_dtype(kind, dtype)
    torch.set_autocast_cache_enabled(False)
    torch.autocast_increment_nesting()  # else the end of a module's own autocast would empty the cache
    try:
        yield
    finally:
        torch.autocast_decrement_nesting()
        torch.set_autocast_cache_enabled(cached)
        torch.set_autocast_dtype(kind, before)
        torch.set_autocast_enabled(kind, enabled)


@contextmanager
def on_streams(streams: Mapping[torch.device, Any], device: torch.device) -> Iterator[None]:
    """Run a block on a device with the caller's streams: the thread of a replica starts on the default ones.

    On the default stream a replica would read its part before the caller's stream has made it.
    """
    with ExitStack() as stack:
        for other, stream in streams.items():
            # A part may come from another device: its transfer must run after the work that makes it.
            if other != device and stream.stream_id != 0:
                stack.enter_context(stream)
        if device.type != "cpu":
            stack.enter_context(on_device(device))
            stack.enter_context(streams[device])
        yield


def has_modes() -> bool:
    """Return whether this thread is in a TorchFunctionMode, a TorchDispatchMode or a transform of torch.func.

    Modes belong to one thread. The parts of a call then run in this thread, one after the other.
    """
    # Private: torch has no public way to ask for active modes; without the check they would be ignored
    # in the replicas' threads.
    if torch._C._len_torch_dispatch_stack() or torch._C._are_functorch_transforms_active():
        return True
    if not torch._C._len_torch_function_stack():
        return False
    from torch.utils._device import DeviceContext  # torch loads it when it is first needed

    # A default device is such a mode, too, and so is our own for random operations: neither counts.
    return any(
        not isinstance(torch._C._get_function_stack_at(i), DeviceContext | SerializedRng)
        for i in range(torch._C._len_torch_function_stack())
    )


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    context: AbstractContextManager[Any] = torch.accelerator.device_index(device.index)
    return context
