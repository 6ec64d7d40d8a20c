"""The command ``tp run``."""
