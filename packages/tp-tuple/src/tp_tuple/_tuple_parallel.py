"""The wrapper that runs a module on a tuple of per-device batches."""

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from tp_core import Parts, recursive_to, resolve_devices
from tp_core.errors import ConfigError
from tp_core.replicas import Replicas

from tp_tuple._collate import MeasuredParts
from tp_tuple._functions import cat
from tp_tuple._speeds import Speeds
from tp_tuple._transpose import arguments_of_parts, per_value

__all__ = ["TupleParallel", "timed"]

_PLAIN = {tuple, list}  # a subclass may know more of its parts, such as how fast they were

_Call = Callable[[nn.Module, Any], Any]


class TupleParallel(nn.DataParallel[nn.Module]):
    """Runs a module on several devices at once; every argument is a tuple with a part for each.

    The parts, which may be of any type, are moved to their devices and go through the replicas of
    the module (`tp_core.replicas.Replicas`). The result is a tuple with one output per part, each
    still on its device; a module that returns several values gives a tuple for each value. Fewer
    parts than devices use the first devices.

    Attributes of the module can be read from the wrapper, ``state_dict()`` has the module's own
    keys, and ``load_state_dict`` takes those with or without ``module.`` in front.

    Args:
        module: The module. It must be on the first device when it runs; with one device it is moved
            there.
        device_ids: One device per part: ``[0, 1]``, ``["cuda:0", "cpu"]``, ``["cpu", "cpu"]``;
            every accelerator by default, or the CPU where there is none.
        transfer_output: Bring the outputs to the output device.
        reduction: Called last, with the outputs; `cat` concatenates them.
        output_device: Where ``transfer_output`` brings them, the first device by default; naming
            one asks for the transfer.
        dim: The dimension along which `cat` concatenates.
        transfer_input: Move the parts to the devices; say ``False`` if they are there.
        speeds: Where to note how fast the devices are; that of ``weights="auto"`` by default.

    Attributes:
        module: The module.
        device_ids: The devices.

    Raises:
        DeviceError: A device does not exist here.

    Example:
        >>> model = TupleParallel(nn.Linear(3, 2), ["cpu", "cpu"])
        >>> [tuple(y.shape) for y in model((torch.zeros(4, 3), torch.zeros(1, 3)))]
        [(4, 2), (1, 2)]
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | str | torch.device] | None = None,
        transfer_output: bool = False,
        reduction: Callable[[Any], Any] | None = None,
        *,
        output_device: int | str | torch.device | None = None,
        dim: int = 0,
        transfer_input: bool = True,
        speeds: Speeds | None = None,
    ) -> None:
        # torch's own constructor knows accelerators alone; being its subclass tells other code
        # that this wraps `module`.
        nn.Module.__init__(self)
        self.module = module
        devices = resolve_devices(None if device_ids is None else list(device_ids))
        self.device_ids: list[Any] = list(devices)
        (target,) = devices[:1] if output_device is None else resolve_devices([output_device])
        self.output_device = target  # type: ignore[assignment]  # as above
        self.src_device_obj = devices[0]
        self.transfer_output = transfer_output or output_device is not None
        self.transfer_input = transfer_input
        self.reduction = reduction
        self.dim = dim
        self.speeds = speeds
        if speeds is not None and speeds.parts != len(devices):
            msg = f"the speeds are those of {speeds.parts} devices, and there are {len(devices)}"
            raise ConfigError(msg)
        if len(devices) == 1:
            module.to(devices[0])
        self._replicas = Replicas(module, list(devices))
        self.register_load_state_dict_pre_hook(_accept_both_names)  # type: ignore[no-untyped-call]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module on every part.

        Raises:
            ConfigError: An argument is no tuple or list, or has the wrong number of parts; or the
                outputs of the parts have different numbers of values.
        """
        replicas = self.replicas
        if len(self.device_ids) == 1 and args and not kwargs and not self.transfer_output:
            inputs = [a[0] for a in args if type(a) in _PLAIN and len(a) == 1]
            if len(inputs) == len(args):  # nothing is to be split, timed or waited for
                outputs = replicas.run(self._call_alone, (inputs,))
                return self._result(outputs)
        if not args and not kwargs:
            parts: list[Any] = [((), {})]
        else:
            parts = arguments_of_parts(args, kwargs, most=len(self.device_ids))
        speeds = _speeds_of(args, kwargs) if self.speeds is None else self.speeds
        call = _call
        if self.transfer_input:
            devices = replicas.devices
            parts = [(*part, device) for part, device in zip(parts, devices, strict=False)]
            call = _move_and_call
        if speeds is not None and not speeds.is_settled:
            outputs = timed(replicas, call, parts, counts=_counts_of(args, kwargs), speeds=speeds)
        else:
            outputs = replicas.run(call, parts)
        if self.transfer_output:
            target: Any = self.output_device
            outputs = [recursive_to(y, target, non_blocking=target.type != "cpu") for y in outputs]
        return self._result(outputs)

    def _call_alone(self, module: nn.Module, inputs: list[Any]) -> Any:
        """Run the module on the only device."""
        if self.transfer_input:
            device = self.device_ids[0]
            inputs = [_moved(x, device) for x in inputs]
        return module(*inputs)

    def _result(self, outputs: list[Any]) -> Any:
        first = outputs[0]  # the usual case needs no look at all of them
        result = tuple(outputs) if type(first) is Tensor else per_value(outputs, tuple, mappings=False)
        if self.reduction is None:
            return result
        return cat(result, dim=self.dim) if self.reduction is cat else self.reduction(result)

    @property
    def replicas(self) -> Replicas:
        """The replicas of the module."""
        replicas: Replicas = self.__dict__["_replicas"]
        if replicas.module is not self._modules["module"]:
            replicas = self._replicas = Replicas(self.module, list(replicas.devices))
        return replicas

    def refresh(self) -> None:
        """Copy all parameters again: after changes through ``.data``, which nothing tells of."""
        self.replicas.refresh()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":  # not there yet
                raise
        return getattr(self.module, name)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's own state."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(
        self,
        state_dict: Mapping[str, Any],
        strict: bool = True,
        assign: bool = False,
    ) -> Any:
        """Load the module's state, from keys with or without ``module.`` in front."""
        own = self.module.state_dict().keys()
        plain: OrderedDict[str, Any] = OrderedDict()
        for key, value in state_dict.items():
            stripped = key.removeprefix("module.")
            plain[stripped if key not in own and stripped in own else key] = value
        return self.module.load_state_dict(plain, strict=strict, assign=assign)


def timed(
    replicas: Replicas, call: _Call, parts: Sequence[Any], *, counts: Sequence[int] | None, speeds: Speeds
) -> list[Any]:
    """Run the replicas and note how long each took, if the sizes of the parts are known."""
    seconds = [0.0] * len(parts)

    def run(replica: nn.Module, numbered: tuple[int, Any]) -> Any:
        number, part = numbered
        start = time.perf_counter()
        result = call(replica, part)
        device = replicas.devices[number]
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        seconds[number] = time.perf_counter() - start
        return result

    outputs = replicas.run(run, list(enumerate(parts)))
    if counts is not None:
        speeds.note(counts=list(counts), seconds=seconds)
    return outputs


def _call(replica: nn.Module, part: Any) -> Any:
    args, kwargs = part
    return replica(*args, **kwargs)


def _move_and_call(replica: nn.Module, part: Any) -> Any:
    args, kwargs, device = part
    moved = [_moved(a, device) for a in args]
    if not kwargs:
        return replica(*moved)
    return replica(*moved, **{name: _moved(a, device) for name, a in kwargs.items()})


def _moved(value: Any, device: torch.device) -> Any:
    if type(value) is Tensor and value.device == device:  # most of all calls, and most of the cost
        return value
    # A copy to the CPU that is not waited for would be read before it is there.
    return recursive_to(value, device, non_blocking=device.type != "cpu")


def _speeds_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Speeds | None:
    for arg in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(arg, MeasuredParts):
            return arg.speeds
    return None


def _counts_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[int] | None:
    """Return the sizes of the parts, from a tuple that knows them or the first tensors."""
    for arg in (*args, *kwargs.values()):
        if isinstance(arg, Parts):
            return arg.counts
    for arg in (*args, *kwargs.values()):
        if all(isinstance(p, Tensor) and p.dim() for p in arg):
            return [p.shape[0] for p in arg]
    return None


def _accept_both_names(wrapper: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Let a surrounding module load keys with and without ``module.`` in front."""
    module: nn.Module = wrapper._modules["module"]  # type: ignore[assignment]  # never None here
    own = module.state_dict().keys()
    for key in [k for k in state_dict if k.startswith(prefix)]:
        rest = key.removeprefix(prefix)
        if rest in own:
            state_dict[f"{prefix}module.{rest}"] = state_dict.pop(key)
