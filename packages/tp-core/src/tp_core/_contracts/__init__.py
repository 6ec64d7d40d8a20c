"""What backends, sessions, collate adapters, engines, callbacks and loggers promise."""
