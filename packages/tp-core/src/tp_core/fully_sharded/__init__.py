"""Models sharded over the ranks that read different samples: torch's ``fully_shard`` under the contract.

The backend ``fsdp`` uses it for whole models, a tensor-parallel backend for its data-parallel copies.
"""

from typing import TYPE_CHECKING

from tp_core._lazy import lazy_exports

if TYPE_CHECKING:
    from tp_core.fully_sharded._memory import resolve_options as resolve_options
    from tp_core.fully_sharded._memory import sharded_memory as sharded_memory
    from tp_core.fully_sharded._optimizers import WholeSteps as WholeSteps
    from tp_core.fully_sharded._optimizers import check_whole_steps as check_whole_steps
    from tp_core.fully_sharded._optimizers import gathers_matrices as gathers_matrices
    from tp_core.fully_sharded._optimizers import total_shard_norm as total_shard_norm
    from tp_core.fully_sharded._optimizers import whole_matrix_optimizer as whole_matrix_optimizer
    from tp_core.fully_sharded._options import FullyShardOptions as FullyShardOptions
    from tp_core.fully_sharded._options import check_offload as check_offload
    from tp_core.fully_sharded._session import FullyShardedSession as FullyShardedSession
    from tp_core.fully_sharded._sharding import Sharding as Sharding
    from tp_core.fully_sharded._sharding import describe_presharded as describe_presharded
    from tp_core.fully_sharded._sharding import presharded_mesh as presharded_mesh
    from tp_core.fully_sharded._sharding import reshard as reshard
    from tp_core.fully_sharded._units import find_units as find_units
else:
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        {
            "tp_core.fully_sharded._memory": ["resolve_options", "sharded_memory"],
            "tp_core.fully_sharded._optimizers": [
                "WholeSteps",
                "check_whole_steps",
                "gathers_matrices",
                "total_shard_norm",
                "whole_matrix_optimizer",
            ],
            "tp_core.fully_sharded._options": ["FullyShardOptions", "check_offload"],
            "tp_core.fully_sharded._session": ["FullyShardedSession"],
            "tp_core.fully_sharded._sharding": [
                "Sharding",
                "describe_presharded",
                "presharded_mesh",
                "reshard",
            ],
            "tp_core.fully_sharded._units": ["find_units"],
        },
    )
