"""What launched this process, and how the processes of a job meet."""
