"""One call on several devices, without a wrapper to keep."""

from collections.abc import Collection
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence
from tp_core import DeviceSpec

from tp_dp_gather._data_parallel import DataParallel

__all__ = ["data_parallel"]

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

    Every call makes the replicas anew; in a loop, `DataParallel` keeps them.

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
        except_keywords: Keys whose values are not gathered.
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
