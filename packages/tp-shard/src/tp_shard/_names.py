"""The names of the attributes that mark a tensor as split; apart, for they need no torch."""

__all__ = ["ORDER_TYPE", "PARALLEL_DIM", "PARALLEL_RANGES", "PARALLEL_SIZE"]

PARALLEL_DIM = "_parallel_dim"
"""The attribute that names the split dimension, as the layers count: inputs 0, outputs 1 or -1."""
ORDER_TYPE = "_order_type"
"""The attribute that says how a parameter's dimensions stand: 0 for (out, in), 1 for (in, out)."""
PARALLEL_SIZE = "_parallel_size"
"""The attribute with the size of the split dimension over all shards."""
PARALLEL_RANGES = "_parallel_ranges"
"""The attribute with what each rank holds of it, where that is not an even cut."""
