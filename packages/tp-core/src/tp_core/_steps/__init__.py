"""What a training step returns, and the backward pass of one that counts as nothing."""
