"""Models sharded over the ranks that read different samples: torch's ``fully_shard`` under the contract.

The backend ``fsdp`` uses it for whole models, a tensor-parallel backend for its data-parallel copies.
"""
