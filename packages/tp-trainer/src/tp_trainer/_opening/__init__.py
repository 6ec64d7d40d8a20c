"""The choice of a backend, and the opening of a session that all ranks agree on."""
