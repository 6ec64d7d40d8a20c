"""Names for programs that were written for torchshard.

Such a program changes its import line alone: ``import torchshard as ts`` becomes ``import tp_shard as ts``,
which has these names too. New programs do not need them: layers split themselves, and DistributedDataParallel
handles shards while there are groups.
"""

from tp_shard._guards import register_ddp_parameters_to_ignore
from tp_shard._shards import ORDER_TYPE, PARALLEL_DIM
from tp_shard._split import slice

__all__ = ["register_ddp_parameters_to_ignore", "slice"]

_PARALLEL_ATTR = _PARALLEL_DIM = PARALLEL_DIM  # attributes of tensors that such programs read
_ORDER_TYPE = ORDER_TYPE
