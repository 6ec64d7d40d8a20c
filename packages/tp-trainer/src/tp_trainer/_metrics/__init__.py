"""Evaluation on any number of devices: means over samples, metrics of the whole set, predictions."""
