"""Devices, and moving nested batches to them."""
