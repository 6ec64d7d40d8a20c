"""Starting the processes of a job: ``tp launch``, and ``tp jobs``, ``tp logs``, ``tp stop``.

The processes themselves are started by torch's elastic launcher, as ``torchrun`` does. What is
added around it: checks before anything starts, whole lines from every rank, a short account of the
rank that failed first, and jobs that outlive the terminal. Nothing here imports torch before a job
is started.
"""
