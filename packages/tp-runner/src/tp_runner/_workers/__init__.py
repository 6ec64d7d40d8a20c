"""What does the work: fleets of processes, threads or actors, and what runs in them."""
