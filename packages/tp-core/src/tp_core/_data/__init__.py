"""Batches: their order, their shares, their loaders."""
