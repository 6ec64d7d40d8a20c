"""The ranks of one host: started, watched, reported on."""
