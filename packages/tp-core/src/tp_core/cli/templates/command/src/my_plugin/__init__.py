"""A sub-command of tp: the devices that a job would get here.

It imports nothing: tp loads this package with all other plugins at its first question.
"""
