"""The hosts of a job: their addresses, their store, and how they hear of failures."""
