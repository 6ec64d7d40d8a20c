"""The state of a split model and its optimizer: whole, sharded, in files, and from other programs' files."""
