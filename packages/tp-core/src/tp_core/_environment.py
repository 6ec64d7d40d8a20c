"""What launched this process, read from the environment."""
