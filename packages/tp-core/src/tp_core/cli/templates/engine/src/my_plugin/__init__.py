"""An engine for tp-runner: threads of concurrent.futures.

It imports nothing: tp loads this package with all other plugins at its first question.
"""
