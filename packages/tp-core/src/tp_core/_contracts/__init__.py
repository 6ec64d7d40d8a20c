"""What backends, sessions, collate adapters, engines and callbacks promise."""
