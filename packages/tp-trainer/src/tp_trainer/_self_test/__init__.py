"""``tp test``: every installed backend trains a small model, and comes to what one device comes to."""
