"""What backends, sessions, collate adapters and engines promise."""
