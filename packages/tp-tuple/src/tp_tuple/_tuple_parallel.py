"""The wrapper that runs a module on a tuple of per-device batches."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from tp_core import DeviceSpec, to_device
from tp_core.arguments import explain_init
from tp_core.data import Parts
from tp_core.errors import ConfigError
from tp_core.replicas import ReplicaWrapper, untraced

from tp_tuple._balance import Speeds, run_timed
from tp_tuple._collate import MeasuredParts
from tp_tuple._functions import arguments_of_parts, cat, per_value

_PLAIN = {tuple, list}  # a subclass, as MeasuredParts, may know more of its parts

_SUCCESSORS = {
    "transfer_data": "pass transfer_input=",
    "parallel_transfer": "pass transfer_input=; the parts are transferred in parallel",
    "custom_parallel_apply": "leave it out: replicas run in threads of their own",
}
"""Options of tuple_parallel's earlier versions, and what to do instead."""

_NEVER_CALLED = {
    "scatter": "arguments are in parts already; override forward, or use tp_dp_gather.DataParallel",
    "gather": "outputs stay in parts; give reduction=, or use tp_dp_gather.DataParallel",
}


@explain_init
class TupleParallel(ReplicaWrapper):
    """Wrapper that runs a module on several devices at once; every argument is a tuple of their parts.

    The parts, which may be of any type, are moved to their devices and go through the replicas of
    the module (`tp_core.replicas.Replicas`). The result is a tuple with one output per part, each
    still on its device; a module that returns several values gives a tuple for each value. Fewer
    parts than devices use the first devices.

    Attributes of the module can be read from the wrapper; ``state_dict()``, ``named_parameters()`` and
    their relatives have the module's own names, and ``load_state_dict`` takes those with or without
    ``module.`` in front. A subclass may override ``replicate`` and ``parallel_apply``.

    Args:
        module: The module. It must be on the first device when it runs; with one device it is moved
            there.
        device_ids: One device per part: ``[0, 1]``, ``["cuda:0", "cpu"]``, ``["cpu", "cpu"]``, or
            whatever else `tp_core.resolve_devices` takes; every accelerator by default, or the CPU where
            there is none.
        transfer_output: Bring the outputs to the output device.
        reduction: Called last, with the outputs; `cat` concatenates them.
        output_device: Where ``transfer_output`` brings them, the first device by default; naming
            one asks for the transfer.
        dim: The dimension along which `cat` concatenates the parts' outputs.
        transfer_input: Move the parts to the devices; say ``False`` if they are there.
        speeds: Where to note how fast the devices are; by default the `Speeds` of ``weights="auto"``.

    Attributes:
        module: The module.
        device_ids: The devices.

    Raises:
        DeviceError: ``device_ids`` or ``output_device`` names a device that this process does not have.
        ConfigError: An option is unknown, ``reduction`` is not a function, ``speeds`` are of another
            number of devices, or a subclass overrides ``scatter`` or ``gather``.

    Example:
        >>> model = TupleParallel(nn.Linear(3, 2), ["cpu", "cpu"])
        >>> [tuple(y.shape) for y in model((torch.zeros(4, 3), torch.zeros(1, 3)))]
        [(4, 2), (1, 2)]
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: DeviceSpec = None,
        transfer_output: bool = False,
        reduction: Callable[[Any], Any] | None = None,
        *,
        output_device: int | str | torch.device | None = None,
        dim: int = 0,
        transfer_input: bool = True,
        speeds: Speeds | None = None,
        **upstream: Any,
    ) -> None:
        self._refuse(upstream, _SUCCESSORS)
        if reduction is not None and not callable(reduction):
            msg = f"reduction must be a function of the outputs, got {reduction!r}; give options by name"
            raise ConfigError(msg)
        super().__init__(module, device_ids, output_device)
        self.transfer_output = transfer_output or output_device is not None
        self.transfer_input = transfer_input
        self.reduction = reduction
        self.dim = dim
        self.speeds = speeds
        count = len(self.device_ids)
        if speeds is not None and speeds.parts != count:
            msg = f"the speeds are of {speeds.parts} devices, and there are {count}"
            raise ConfigError(msg)
        use_module_names(self)

    @untraced
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module on every part.

        Collectives: forward copies changed parameters to the other devices, and gathers outputs where
        ``transfer_output`` asks for it; backward sums the replicas' gradients into the module's.

        Raises:
            ConfigError: An argument is not a tuple or list, or has the wrong number of parts; or the
                outputs of the parts have different numbers of values.
            ModelError: The module cannot be replicated as it is, or is not on the first device.
        """
        replicas = self.replicas
        if len(self.device_ids) == 1 and args and not kwargs:
            inputs = [a[0] for a in args if type(a) in _PLAIN and len(a) == 1]
            if len(inputs) == len(args):  # nothing is to be split, timed or waited for
                return self._result([replicas.run_alone(self._call_alone, inputs)])
        if not args and not kwargs:
            parts: list[Any] = [((), {})]
        else:
            parts = arguments_of_parts(args, kwargs, most=len(self.device_ids))
        if self._overrides(ReplicaWrapper, "replicate", "parallel_apply"):
            return self._result(self._run(parts, move=self.transfer_input))
        if self.speeds is None:
            speeds = _speeds_of(args, kwargs)
        else:
            speeds = self.speeds
        call = _call
        devices = replicas.devices
        if self.transfer_input and not _are_placed(parts, devices):
            parts = [(*part, device) for part, device in zip(parts, devices, strict=False)]
            call = _move_and_call
        if speeds is not None and not speeds.is_settled:
            outputs = run_timed(replicas, call, parts, counts=_counts_of(args, kwargs), speeds=speeds)
        else:
            outputs = replicas.run(call, parts)
        return self._result(outputs)

    def _call_alone(self, module: nn.Module, inputs: list[Any]) -> Any:
        if self.transfer_input:
            device = self.device_ids[0]
            inputs = [_move(x, device) for x in inputs]
        return module(*inputs)

    def _result(self, outputs: list[Any]) -> Any:
        if self.transfer_output:
            outputs = [to_device(y, self.output_device) for y in outputs]
        first = outputs[0]  # the usual case needs no look at all of them
        if type(first) is Tensor:
            result = tuple(outputs)
        else:
            result = per_value(outputs, tuple, mappings=False)
        if self.reduction is None:
            return result
        if self.reduction is cat:
            return cat(result, dim=self.dim)
        return self.reduction(result)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            # "module" is not set yet; the other would mean that the wrapper itself is compiled.
            if name in {"module", "get_compiler_config"}:
                raise
        return getattr(self.module, name)

    def named_modules(
        self,
        memo: set[nn.Module] | None = None,
        prefix: str = "",
        remove_duplicate: bool = True,
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yield the wrapper, and the modules in it under the names that they have without it."""
        seen = set() if memo is None else memo
        if self in seen:
            return
        if remove_duplicate:
            seen.add(self)
        yield prefix, self
        yield from self.module.named_modules(seen, prefix, remove_duplicate)

    def _fqn_modifiers(self) -> dict[str, str]:
        # torch.distributed.checkpoint calls it (private to torch) where hooks rename a state's keys; without
        # it test_distributed_checkpoints_name_model_and_optimizer_alike fails.
        return {"": "module"}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name, instead in _NEVER_CALLED.items():
            if name in cls.__dict__:
                msg = f"{cls.__qualname__}.{name} would never be called: {instead}"
                raise ConfigError(msg)


def _call(replica: nn.Module, part: Any) -> Any:
    args, kwargs = part
    return replica(*args, **kwargs)


def _move_and_call(replica: nn.Module, part: Any) -> Any:
    args, kwargs, device = part
    moved = [_move(a, device) for a in args]
    if not kwargs:
        return replica(*moved)
    return replica(*moved, **{name: _move(a, device) for name, a in kwargs.items()})


def _are_placed(parts: Sequence[Any], devices: Sequence[torch.device]) -> bool:
    """Return whether all arguments are tensors on the devices of their parts.

    Checked before the replicas run: within their threads the check takes ten times as long.
    """
    for (args, kwargs), device in zip(parts, devices, strict=False):
        if kwargs:
            return False
        for value in args:
            if type(value) is not Tensor or value.device != device:
                return False
    return True


def _move(value: Any, device: torch.device) -> Any:
    if type(value) is Tensor and value.device == device:  # most of all calls, and most of the cost
        return value
    return to_device(value, device)


def _speeds_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Speeds | None:
    values = (*args, *kwargs.values()) if kwargs else args
    for arg in values:
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


def use_module_names(wrapper: nn.Module) -> None:
    """Leave ``module.`` out of the names in ``wrapper``'s states, and of those that loading reports."""
    wrapper.register_state_dict_post_hook(_leave_out_module)
    wrapper.register_load_state_dict_pre_hook(_note_prefix)
    wrapper.register_load_state_dict_post_hook(_report_without_module)


def _leave_out_module(_wrapper: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    inner = f"{prefix}module."
    values = {key: state.pop(key) for key in [key for key in state if key.startswith(inner)]}
    state.update({prefix + key.removeprefix(inner): value for key, value in values.items()})
    versions = getattr(state, "_metadata", None)
    if versions is not None:
        # Under both names: those without are for the plain module, loading looks for the others. `_metadata`
        # is torch's own; test_versions_of_states_are_not_lost notices its loss.
        own = {key: value for key, value in versions.items() if f"{key}.".startswith(inner)}
        versions.update({f"{prefix}{key[len(inner) :]}".rstrip("."): v for key, v in own.items()})


def _note_prefix(wrapper: nn.Module, _state: dict[str, Any], prefix: str, *_: Any) -> None:
    wrapper.__dict__["_loading_prefix"] = prefix


def _report_without_module(wrapper: nn.Module, incompatible: Any) -> None:
    prefix = wrapper.__dict__.pop("_loading_prefix")
    missing: list[str] = incompatible.missing_keys
    inner = f"{prefix}module."
    missing[:] = [prefix + key.removeprefix(inner) if key.startswith(inner) else key for key in missing]
