"""From the installed backends to a session that all ranks agree on."""
