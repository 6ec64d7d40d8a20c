"""Which tensors are shards, how they were cut, and where in the whole they lie.

A layer of this package has that itself (``_layer``); attributes of the tensors have it for other code
(``_attributes``); ``_slices`` answers for a whole model and for one tensor. Under ``fully_shard`` each
shard is cut once more (``_dtensors``).
"""
