"""Which item goes to which worker when, and what happens to its result."""
