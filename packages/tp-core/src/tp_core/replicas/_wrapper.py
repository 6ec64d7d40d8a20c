"""The base class of modules that wrap replicas."""

import inspect
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from tp_core._devices import DeviceSpec, resolve_devices
from tp_core._transfer import move_module, to_device
from tp_core.errors import ConfigError, ModelError
from tp_core.messages import did_you_mean
from tp_core.replicas._replicas import Replicas

Device = int | str | torch.device
Arguments = tuple[Sequence[Any], Mapping[str, Any]]


class ReplicaWrapper(nn.DataParallel[nn.Module]):
    """A base class for modules that run the replicas of another module.

    It is an ``nn.DataParallel``, so that other code recognizes a wrapper of ``module``. A subclass may
    override ``replicate`` and ``parallel_apply``, as subclasses of ``nn.DataParallel`` do. States are
    loaded with and without ``module.`` in front of their names.

    Args:
        module: The module; with one device it is moved there.
        device_ids: One device per replica, as `tp_core.resolve_devices` takes them; every accelerator by
            default, or the CPU where there is none.
        output_device: Where outputs go, if anywhere; -1 is the CPU, the first device the default.

    Attributes:
        module: The module.
        device_ids: The devices, as ``torch.device``.
        output_device: Where outputs go.

    Raises:
        DeviceError: ``device_ids`` or ``output_device`` names a device that this process does not have.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: DeviceSpec = None,
        output_device: Device | None = None,
    ) -> None:
        # torch's own constructor accepts accelerators only: CPU replicas would be refused.
        nn.Module.__init__(self)
        if not isinstance(module, nn.Module):
            kind = type(module).__name__
            msg = f"{type(self).__name__} wraps a torch.nn.Module, got {kind}: {module!r:.80}"
            raise ModelError(msg)
        self.module = module
        self.training = module.training
        devices = resolve_devices(device_ids)
        self.device_ids: list[Any] = list(devices)
        self.output_device: Any = devices[0] if output_device is None else self._device_of(output_device)
        self.src_device_obj = devices[0]
        if len(devices) == 1:
            move_module(module, devices[0])
        self._replicas = Replicas(module, list(devices))
        self.register_load_state_dict_pre_hook(_take_both_names)  # type: ignore[no-untyped-call]

    @property
    def replicas(self) -> Replicas:
        """The replicas of the module."""
        replicas: Replicas = self.__dict__["_replicas"]
        if replicas.module is not self._modules["module"]:
            replicas = self._replicas = Replicas(self.module, list(replicas.devices))
        return replicas

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load a state with or without ``module.`` in front of its names.

        Raises:
            RuntimeError: Names or shapes do not fit the module (torch's own error).
        """
        state: OrderedDict[str, Any] = OrderedDict(state_dict)
        versions = getattr(state_dict, "_metadata", None)
        if versions is not None:
            inner = {f"module.{name}".rstrip("."): version for name, version in versions.items()}
            state._metadata = {**inner, **versions}  # type: ignore[attr-defined]  # as torch does
        return super().load_state_dict(state, strict=strict, assign=assign)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the module, each replica separately, but not the code that splits and joins.

        ``torch.compile(wrapper)`` compiles nothing of the module: torch cannot trace into threads.

        Args:
            *args: Must be empty; it is in torch's signature.
            **kwargs: As :func:`torch.compile` takes them.
        """
        self.replicas.compile(*args, **kwargs)

    def refresh(self) -> None:
        """Copy all parameters again at the next call, whether they have changed or not."""
        self.replicas.refresh()

    def replicate(self, module: nn.Module, device_ids: Sequence[Device]) -> list[nn.Module]:
        """Return a replica of ``module`` on each device; the module must be on the first.

        Replicas of the wrapped module are the same objects in every call, updated each time. An
        override of this method is called before each forward.

        Raises:
            ModelError: The module cannot be replicated as it is.
        """
        devices = resolve_devices(device_ids)
        replicas = self.replicas
        if module is not replicas.module or devices != replicas.devices[: len(devices)]:
            replicas = Replicas(module, list(devices))
        return replicas.modules(len(devices))

    def parallel_apply(
        self,
        replicas: Sequence[nn.Module],
        inputs: Sequence[Any],
        kwargs: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[Any]:
        """Return ``replica(*args, **kwargs)`` for each replica, on its device, all at once.

        Args:
            replicas: Modules on the first devices, usually the result of `replicate`.
            inputs: The positional arguments of each, or its only one.
            kwargs: The keyword arguments of each.

        Raises:
            ConfigError: The number of inputs is not the number of replicas.
        """
        pairs = self._pair_up(inputs, kwargs)
        if len(pairs) != len(replicas):
            msg = f"expected inputs for {len(replicas)} replicas, got {len(pairs)}"
            raise ConfigError(msg)
        own = self.replicas
        parts = [(*pair, device) for pair, device in zip(pairs, own.devices, strict=False)]
        return own.run(_move_and_call, parts, modules=replicas)

    @staticmethod
    def _device_of(device: Device) -> torch.device:
        """Return the device; -1 is the CPU, as in torch's older functions."""
        if type(device) is int and device == -1:
            device = "cpu"
        (resolved,) = resolve_devices([device])
        return resolved

    @staticmethod
    def _pair_up(inputs: Sequence[Any], kwargs: Sequence[Mapping[str, Any]] | None) -> list[Arguments]:
        """Return the arguments of each part as pairs, from the two lists of torch's methods."""
        keywords = [{} for _ in inputs] if kwargs is None else [k or {} for k in kwargs]
        if len(keywords) != len(inputs):
            msg = f"expected keyword arguments for {len(inputs)} parts, got those of {len(keywords)}"
            raise ConfigError(msg)
        rows = [
            i if isinstance(i, tuple | list) and not isinstance(i, PackedSequence) else (i,) for i in inputs
        ]
        return list(zip(rows, keywords, strict=True))

    def _overrides(self, base: type[nn.Module], *names: str) -> bool:
        """Return whether the object overrides one of these methods of ``base``."""
        cls = type(self)
        for name in names:  # noqa: SIM110 - asked on each call, where a generator takes twice as long
            if name in self.__dict__ or getattr(cls, name) is not getattr(base, name):
                return True
        return False

    @classmethod
    def _refuse(cls, options: Mapping[str, Any], successors: Mapping[str, str]) -> None:
        if options:
            known = {n for n, p in inspect.signature(cls).parameters.items() if p.kind is not p.VAR_KEYWORD}
            hints = [
                f"{name}={value!r:.40} ({successors.get(name) or 'unknown' + did_you_mean(name, known)})"
                for name, value in options.items()
            ]
            msg = f"{cls.__name__} does not have the option {', '.join(hints)}"
            raise ConfigError(msg)

    def _run(self, arguments: Sequence[Arguments], *, move: bool = True) -> list[Any]:
        """Run the replicas, through a subclass's ``replicate`` and ``parallel_apply`` where overridden."""
        replicas = self.replicas
        parts = [(*pair, device) for pair, device in zip(arguments, replicas.devices, strict=False)]
        if len(replicas) == 1 or not self._overrides(ReplicaWrapper, "replicate", "parallel_apply"):
            return replicas.run(_move_and_call, parts)
        moved = [_moved(part) for part in parts] if move else arguments
        modules = self.replicate(self.module, self.device_ids[: len(parts)])
        outputs = self.parallel_apply(modules, [args for args, _ in moved], [kwargs for _, kwargs in moved])
        return list(outputs)


def _move_and_call(module: nn.Module, part: tuple[Sequence[Any], Mapping[str, Any], torch.device]) -> Any:
    args, kwargs = _moved(part)
    return module(*args, **kwargs)


def _moved(part: tuple[Sequence[Any], Mapping[str, Any], torch.device]) -> Arguments:
    args, kwargs, device = part
    return to_device((tuple(args), dict(kwargs)), device)


def _take_both_names(wrapper: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Add ``module.`` to the names of a state that lacks it, before torch loads the state."""
    module: nn.Module = wrapper._modules["module"]  # type: ignore[assignment]  # never None here
    own = module.state_dict().keys()
    if all(f"{prefix}module.{name}" in state for name in own):
        return  # a child may be called "module" too: its names would be taken for the module's own
    plain = [f"{prefix}{name}" for name in own if f"{prefix}{name}" in state]
    values = {key: state.pop(key) for key in plain}  # all of them, before one takes another's place
    state.update({f"{prefix}module.{key.removeprefix(prefix)}": value for key, value in values.items()})
