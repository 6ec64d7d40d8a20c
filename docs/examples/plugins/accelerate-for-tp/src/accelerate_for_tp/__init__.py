"""A backend for tp: the model is wrapped by Hugging Face Accelerate.

It imports nothing: tp loads this package with all other plugins at its first question.
"""
