"""The state of a split model and its optimizer: whole, sharded, in files, and from files of others."""
