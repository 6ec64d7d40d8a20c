"""Workers that are actors on a Ray cluster."""
