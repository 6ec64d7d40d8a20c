"""The backend ``fsdp``: each rank holds a shard of every parameter, its gradient and its optimizer state."""
