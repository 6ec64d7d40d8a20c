"""Which tensors are shards, how they were cut, and where in the whole they lie.

A layer of this package knows it by itself (``_layer``); marks on the tensors say it to others (``_marks``,
``_register``); ``_table`` answers for a whole model and ``_pieces`` for one tensor. Under ``fully_shard``
each shard is cut once more (``_dtensors``).
"""
