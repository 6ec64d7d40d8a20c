"""How much memory a job would need, before anything is moved: a step is run on tensors without any."""
