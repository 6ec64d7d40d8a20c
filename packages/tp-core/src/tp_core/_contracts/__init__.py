"""The contracts of backends, sessions, collate adapters, engines, callbacks and loggers."""
