"""A collate adapter for tp: batches of graphs of torch_geometric, a part for each device.

It imports nothing: tp loads this package with all other plugins at its first question.
"""
