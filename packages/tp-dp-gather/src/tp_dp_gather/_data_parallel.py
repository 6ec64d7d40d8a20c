"""The wrapper that splits whole batches and gathers what it is told to."""

import warnings
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from tp_core import recursive_to, resolve_devices
from tp_core.errors import ConfigError
from tp_core.replicas import Replicas

from tp_dp_gather._gather import Gathering, sorted_by_device
from tp_dp_gather._loss import Criterion, parallel_loss
from tp_dp_gather._scatter import scatter_arguments, split_scattered

__all__ = ["DataParallel", "data_parallel"]

Device = int | str | torch.device


class DataParallel(nn.DataParallel[nn.Module]):
    """Splits a batch over the devices, runs the module on each, and gathers the outputs it should.

    Parts come in the order of ``device_ids``. Tensors are concatenated, scalars stacked to a
    vector, anything else becomes a list of the parts' values. A batch with fewer rows than devices
    uses the first ones. Wrappers can be chained: what one leaves in parts, the next one takes so.

    Args:
        module: The module. It must be on the first device when it runs; with one device it is moved
            there. Optimizers that were made before keep working.
        device_ids: ``[0, 1]``, ``["cuda:0", "cpu"]``, ``["cpu", "cpu"]``; every accelerator by
            default, or the CPU where there is none.
        output_device: Where outputs are gathered; the first device by default.
        dim: The dimension of the rows, in inputs and outputs.
        gather_to_one_device: Say ``False`` to get a tuple with each part's output, on its device.
        inputs_are_scattered: Each argument is a tuple or list with one part per device already.
        except_keywords: Keys, at any depth of dicts, named tuples and dataclasses, whose values are
            not gathered: they become tuples of parts.
        sort_and_gather: Order the parts by their devices' indices instead of ``device_ids``.

    Attributes:
        module: The module.
        device_ids: The devices.

    Raises:
        DeviceError: A device does not exist here.
        ConfigError: Options contradict each other.

    Example:
        >>> net = DataParallel(nn.Linear(5, 2), ["cpu", "cpu"], gather_to_one_device=False)
        >>> [tuple(part.shape) for part in net(torch.ones(16, 5))]
        [(8, 2), (8, 2)]
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[Device] | None = None,
        output_device: Device | None = None,
        dim: int = 0,
        gather_to_one_device: bool = True,
        inputs_are_scattered: bool = False,
        except_keywords: Collection[str] | str = (),
        sort_and_gather: bool = False,
    ) -> None:
        # torch's own constructor knows accelerators alone; being its subclass tells other code
        # that this wraps `module`.
        nn.Module.__init__(self)
        if dim < 0:
            msg = f"dim must be at least 0, got {dim}"
            raise ConfigError(msg)
        keywords = (except_keywords,) if isinstance(except_keywords, str) else tuple(except_keywords)
        if not gather_to_one_device and keywords:
            msg = (
                f"except_keywords={list(keywords)!r} leaves some of the output in parts, and "
                "gather_to_one_device=False leaves all of it; give one of the two"
            )
            raise ConfigError(msg)
        self.module = module
        devices = resolve_devices(None if device_ids is None else list(device_ids))
        self.device_ids: list[Any] = list(devices)
        (target,) = devices[:1] if output_device is None else resolve_devices([output_device])
        self.output_device: Any = target
        self.src_device_obj = devices[0]
        self.dim = dim
        self.gather_to_one_device = gather_to_one_device
        self.inputs_are_scattered = inputs_are_scattered
        self.except_keywords = frozenset(keywords)
        self.sort_and_gather = sort_and_gather
        self._unseen = set(keywords)
        if len(devices) == 1:
            module.to(devices[0])
        self._replicas = Replicas(module, list(devices))
        self._criterion: Replicas | None = None

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module on every part of the inputs.

        Raises:
            ConfigError: The inputs cannot be split, or the outputs not be gathered.
        """
        replicas = self.replicas
        if self.inputs_are_scattered:
            arguments = split_scattered(inputs, kwargs, most=len(replicas))
        else:
            arguments = scatter_arguments(inputs, kwargs, most=len(replicas), dim=self.dim)
        outputs = replicas.run(_move_and_call, list(zip(arguments, replicas.devices, strict=False)))
        if self.sort_and_gather:
            outputs = sorted_by_device(outputs, replicas.devices)
        if not self.gather_to_one_device:
            return tuple(outputs)
        gathering = Gathering(self.output_device, self.dim, self.except_keywords)
        result = gathering.gather(outputs)
        if self._unseen:
            self._warn_of_unseen(gathering.keys)
        return result

    def apply_loss(
        self, criterion: Criterion, outputs: Sequence[Any], targets: Any, *, reduction: str | None = None
    ) -> Tensor:
        """Return the loss of outputs that were left in parts, computed where each part is.

        The same as ``criterion(whole output, targets)``, but only numbers travel to the output
        device.

        Args:
            criterion: A loss module or function of an output and a target. Means of
                ``CrossEntropyLoss`` and ``NLLLoss`` heed their weights and ``ignore_index`` over
                the whole batch; all others are weighted by rows.
            outputs: The parts of the output.
            targets: The whole target, or its parts.
            reduction: "mean" or "sum"; by default the criterion's own ``.reduction``, or "mean"
                where it has none. A criterion that reduces nothing gives the whole vector.

        Raises:
            ConfigError: The outputs are no parts, or the targets do not go with them.

        Example:
            >>> net = DataParallel(nn.Linear(5, 2), ["cpu", "cpu"], gather_to_one_device=False)
            >>> y = torch.zeros(16, dtype=torch.long)
            >>> net.apply_loss(nn.CrossEntropyLoss(), net(torch.ones(16, 5)), y).dim()
            0
        """
        if reduction not in {None, "mean", "sum"}:
            msg = f"reduction must be 'mean', 'sum' or None for the criterion's own, got {reduction!r}"
            raise ConfigError(msg)
        return parallel_loss(
            criterion,
            outputs,
            targets,
            replicas=self._replicas_of(criterion),
            device=self.output_device,
            dim=self.dim,
            reduction=reduction,
        )

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

    def _replicas_of(self, criterion: Criterion) -> Replicas:
        """Return who computes a criterion: replicas of it, if it has weights of its own."""
        if not isinstance(criterion, nn.Module) or not (
            any(True for _ in criterion.parameters()) or any(True for _ in criterion.buffers())
        ):
            return self.replicas  # only their threads are needed
        if self._criterion is None or self._criterion.module is not criterion:
            devices = self.replicas.devices
            self._criterion = Replicas(criterion.to(devices[0]), list(devices))
        return self._criterion

    def _warn_of_unseen(self, keys: set[str]) -> None:
        missing = sorted(self._unseen - keys)
        self._unseen.clear()
        if missing:
            warnings.warn(
                f"except_keywords names {', '.join(map(repr, missing))}, and no output has such a key; "
                f"the keys are: {', '.join(map(repr, sorted(keys))) or 'none'}",
                stacklevel=4,
            )


def data_parallel(
    module: nn.Module,
    inputs: Any,
    device_ids: Sequence[Device] | None = None,
    output_device: Device | None = None,
    dim: int = 0,
    module_kwargs: dict[str, Any] | None = None,
    *,
    gather_to_one_device: bool = True,
    inputs_are_scattered: bool = False,
    except_keywords: Collection[str] | str = (),
    sort_and_gather: bool = False,
) -> Any:
    """Run ``module`` once on several devices: the functional form of `DataParallel`.

    Every call makes the replicas anew; in a loop, `DataParallel` keeps them.

    Args:
        module: The module, on the first device.
        inputs: A tuple of positional arguments, or the one argument; ``None`` for none.
        device_ids: As in `DataParallel`, like the other options.
        output_device: Where outputs are gathered.
        dim: The dimension of the rows.
        module_kwargs: Keyword arguments.
        gather_to_one_device: Say ``False`` for a tuple of parts.
        inputs_are_scattered: Each argument is a tuple or list of parts.
        except_keywords: Keys whose values are not gathered.
        sort_and_gather: Order the parts by their devices' indices.

    Example:
        >>> data_parallel(nn.Linear(5, 2), torch.ones(16, 5), ["cpu", "cpu"]).shape
        torch.Size([16, 2])
    """
    wrapped = DataParallel(
        module,
        device_ids,
        output_device,
        dim,
        gather_to_one_device=gather_to_one_device,
        inputs_are_scattered=inputs_are_scattered,
        except_keywords=except_keywords,
        sort_and_gather=sort_and_gather,
    )
    args = inputs if isinstance(inputs, tuple) else () if inputs is None else (inputs,)
    return wrapped(*args, **(module_kwargs or {}))


def _move_and_call(replica: nn.Module, part: Any) -> Any:
    arguments, device = part
    # A copy to the CPU that is not waited for would be read before it is there.
    args, kwargs = recursive_to(arguments, device, non_blocking=device.type != "cpu")
    return replica(*args, **kwargs)
