"""A run of ``fit``: its loop, its state, and what watches it."""
