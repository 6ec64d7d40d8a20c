"""Assign items to workers, retry them, and put their results in order."""
