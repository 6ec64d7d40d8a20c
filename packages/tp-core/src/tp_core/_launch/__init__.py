"""The launch environment of this process, and the process group of a job."""
