"""Estimates of a job's memory, from one step on tensors without memory."""
