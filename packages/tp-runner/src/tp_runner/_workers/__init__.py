"""Workers: fleets of processes or threads, and the code that runs in them."""
