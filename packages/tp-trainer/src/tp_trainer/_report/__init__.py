"""The story of a run as one page: made from the record in its folder, with nothing that needs a network."""
