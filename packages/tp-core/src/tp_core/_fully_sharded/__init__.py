"""Models sharded over the ranks that read different samples: torch's ``fully_shard`` under the contract.

What the backend ``fsdp`` does with whole models, and a backend that splits tensors with its copies.
"""
