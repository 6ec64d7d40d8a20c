"""The backends that come with the trainer."""
