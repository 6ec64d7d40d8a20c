"""Sequence parallelism: between the split layers each rank has a part of the sequence."""
