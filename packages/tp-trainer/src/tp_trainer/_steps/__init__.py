"""The parts of a training step: loaders' shares, precision, losses and their means, the optimizer step."""
