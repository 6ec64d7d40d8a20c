"""What only programs written for torchshard use: one of them changes its import line alone.

``import torchshard as ts`` becomes ``import tp_shard as ts``: these names can be taken from there, too. New
programs need none of them: layers cut themselves, and DistributedDataParallel is taught of shards while there
are groups.
"""

from tp_shard._guards import register_ddp_parameters_to_ignore
from tp_shard._shards._attributes import ORDER_TYPE, PARALLEL_DIM
from tp_shard._split import slice

__all__ = ["register_ddp_parameters_to_ignore", "slice"]

_PARALLEL_ATTR = _PARALLEL_DIM = PARALLEL_DIM  # names of attributes of tensors, which such programs read
_ORDER_TYPE = ORDER_TYPE
