"""A collate adapter for tp: parts of a batch with nearly equal lengths.

It imports nothing: tp loads this package with all other plugins at its first question.
"""
