"""``tp train``: a typed function of a script, run with values from options and files."""
