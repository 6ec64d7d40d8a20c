"""What a training step is made of: weights, sums, precision, the optimizer's part."""
