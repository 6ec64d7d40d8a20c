"""Named tensors in files, and which part of a whole tensor one is."""
