"""`DataParallel` as functions: one call without a wrapper to keep, and its steps under torch's names."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from tp_core import DeviceSpec, recursive_to, resolve_devices, tree_leaves
from tp_core.errors import ConfigError
from tp_core.replicas import Replicas, ReplicaWrapper

from tp_dp_gather._data_parallel import DataParallel
from tp_dp_gather._gather import Gathering, sorted_by_device
from tp_dp_gather._scatter import Scattering

Device = int | str | torch.device


def data_parallel(
    module: nn.Module,
    inputs: Any,
    device_ids: DeviceSpec = None,
    output_device: Device | None = None,
    dim: int = 0,
    module_kwargs: dict[str, Any] | None = None,
    *,
    gather_to_one_device: bool = True,
    inputs_are_scattered: bool = False,
    except_keywords: Collection[str] | str = (),
    sort_and_gather: bool = False,
    broadcast: Collection[str | int] | str = (),
) -> Any:
    """Run ``module`` once on several devices: the functional form of `DataParallel`.

    Every call makes new replicas; in a loop, `DataParallel` keeps them.

    Collectives: as in the forward of `DataParallel`.

    Args:
        module: The module, on the first device.
        inputs: A tuple of positional arguments, or the one argument; ``None`` for none. The tensors in them
            have the whole batch's rows in ``dim``.
        device_ids: As in `DataParallel`, like the other options.
        output_device: Where outputs are gathered.
        dim: The dimension of the rows.
        module_kwargs: Keyword arguments.
        gather_to_one_device: ``False`` returns a tuple of parts.
        inputs_are_scattered: Each argument is a tuple or list of parts.
        except_keywords: Keys of values that are not gathered.
        sort_and_gather: Order the parts by their devices' indices.
        broadcast: Arguments that each device gets whole.

    Returns:
        The outputs, joined along ``dim`` on ``output_device``; or a tuple with each part's output, on its
        device.

    Raises:
        ConfigError: Options contradict each other, or inputs cannot be split or outputs not be gathered.
        DeviceError: ``device_ids`` or ``output_device`` names a device that this process does not have.
        ModelError: The module cannot be replicated as it is.

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
        broadcast=broadcast,
    )
    is_one = not isinstance(inputs, tuple) or isinstance(inputs, PackedSequence)  # a tuple by inheritance
    args = () if inputs is None else (inputs,) if is_one else inputs
    return wrapped(*args, **(module_kwargs or {}))


def scatter(inputs: Any, target_devices: DeviceSpec, dim: int = 0) -> tuple[Any, ...]:
    """Split the rows of all tensors in ``inputs``, one piece for each device, and move the pieces there.

    Fewer rows than devices make fewer pieces; what is not a tensor is in each of them.

    Collectives: forward copies the pieces to their devices; backward gathers the inputs' gradients.

    Args:
        inputs: A tensor, or anything around tensors.
        target_devices: The devices, as `tp_core.resolve_devices` takes them.
        dim: The dimension of the rows.

    Returns:
        A tuple of pieces like ``inputs``, at most one for each device; their numbers of rows differ by at
        most one, larger ones first.

    Raises:
        ConfigError: Tensors have different numbers of rows, or a list, tuple or array is as long.
        DeviceError: ``target_devices`` names a device that this process does not have.

    Example:
        >>> [tuple(piece.shape) for piece in scatter(torch.ones(5, 2), ["cpu", "cpu"])]
        [(3, 2), (2, 2)]
    """
    devices = resolve_devices(target_devices)
    scattering = Scattering(dim)
    sizes = scattering.sizes(inputs, most=len(devices))
    pieces = scattering.parts(inputs, sizes) if len(sizes) > 1 else [inputs]
    return tuple([_moved(piece, device) for piece, device in zip(pieces, devices, strict=False)])


def gather(outputs: Sequence[Any], target_device: Device, dim: int = 0) -> Any:
    """Join the parts' outputs to one output on ``target_device``.

    Collectives: forward gathers the parts; backward scatters the output's gradient to them.

    Args:
        outputs: The parts' outputs, of one structure; tensors have the same shape but for ``dim``.
        target_device: Where to; -1 is the CPU.
        dim: The dimension to concatenate along; scalars become a vector.

    Raises:
        ConfigError: ``outputs`` is empty, or its elements differ in structure.

    Example:
        >>> gather([torch.ones(2, 3), torch.ones(1, 3)], "cpu").shape
        torch.Size([3, 3])
    """
    return Gathering(ReplicaWrapper._device_of(target_device), dim, ()).gather(outputs)


def replicate(network: nn.Module, devices: DeviceSpec, detach: bool = False) -> list[nn.Module]:
    """Return replicas of ``network``: on the first device, where it must be, the module itself.

    Collectives: forward broadcasts the parameters; backward sums the replicas' gradients into the module's,
    unless ``detach``.

    Args:
        network: The module.
        devices: One device per replica.
        detach: If ``True``, gradients stay in the replicas and do not reach the module.

    Raises:
        ModelError: The module cannot be replicated as it is.
        DeviceError: ``devices`` names a device that this process does not have.
    """
    with torch.set_grad_enabled(torch.is_grad_enabled() and not detach):
        return Replicas(network, devices).modules()


def parallel_apply(
    modules: Sequence[Callable[..., Any]],
    inputs: Sequence[Any],
    kwargs_tup: Sequence[Mapping[str, Any]] | None = None,
    devices: DeviceSpec = None,
) -> list[Any]:
    """Return ``module(*args, **kwargs)`` for each module, each in a thread of its own, all at once.

    Args:
        modules: The modules.
        inputs: For each its positional arguments, or the only one; they are not moved.
        kwargs_tup: For each its keyword arguments.
        devices: The device of each; by default its inputs' device.

    Raises:
        ConfigError: There are not as many inputs or devices as modules.
        DeviceError: ``devices`` names a device that this process does not have.
        Exception: Whatever a module raised.

    Example:
        >>> parallel_apply([abs, len], [(-3,), ("four",)])
        [3, 4]
    """
    pairs = ReplicaWrapper._pair_up(inputs, kwargs_tup)
    where = [_device_of(pair) for pair in pairs] if devices is None else resolve_devices(devices)
    if not len(modules) == len(pairs) == len(where):
        msg = f"{len(modules)} modules need as many inputs and devices, got {len(pairs)} and {len(where)}"
        raise ConfigError(msg)
    threads = Replicas(nn.Identity(), list(where))
    numbered = list(zip(modules, pairs, strict=True))
    return threads.run(lambda _, call: call[0](*call[1][0], **call[1][1]), numbered)


def sort_by_device(outputs: Sequence[Any]) -> tuple[Any, ...]:
    """Return the parts in the order of the devices that they are on, by type and index.

    Example:
        >>> sort_by_device([torch.ones(1), torch.zeros(2)])
        (tensor([1.]), tensor([0., 0.]))
    """
    return tuple(sorted_by_device(outputs, [_device_of(output) for output in outputs]))


def _device_of(value: Any) -> torch.device:
    return next((x.device for x in tree_leaves(value) if isinstance(x, Tensor)), torch.device("cpu"))


def _moved(value: Any, device: torch.device) -> Any:
    return recursive_to(value, device, non_blocking=device.type != "cpu")
