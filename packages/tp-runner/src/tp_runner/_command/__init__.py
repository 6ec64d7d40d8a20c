"""The command ``tp run``: a batch of items through a runner, from files to a file, with resume."""
