"""Shards: how tensors are split, and where each shard lies in the whole tensor.

A layer of this package knows its split itself (``_layer``). Other code reads it from attributes of the
tensors (``_attributes``). ``_slices`` finds the shards of a model and their places. Under ``fully_shard``
each shard is split once more (``_dtensors``).
"""
