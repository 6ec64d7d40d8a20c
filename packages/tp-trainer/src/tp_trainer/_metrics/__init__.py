"""Evaluation: means over samples, metrics of the whole set, predictions; on any number of devices."""
