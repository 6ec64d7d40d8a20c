"""The process group for tensors of simulated devices: ``simccl``, with the contract of NCCL, over gloo."""

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from tp_simulator._build import extension

NAME = "simccl"


def register() -> None:
    """Make the group known to torch, as what devices of this type get where nothing is named."""
    if dist.is_available() and dist.is_gloo_available():
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["sim"])


def _create(options: Any, _: Any) -> Any:
    store, timeout = options.store, options.timeout
    rank, size = options.group_rank, options.group_size
    gloo = dist.ProcessGroupGloo(PrefixStore("gloo/", store), rank, size, timeout=timeout)
    milliseconds = timeout // timedelta(milliseconds=1)
    return extension().make_group(gloo, store, rank, size, options.group_id, milliseconds)
