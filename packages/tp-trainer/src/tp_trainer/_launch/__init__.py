"""The launcher: ``tp launch``, ``launch()`` for programs, and jobs in the background.

torch's elastic launcher starts the processes, as ``torchrun`` does. This room adds checks before anything
starts, whole lines from every rank, a short account of the rank that failed first, and jobs that outlive the
terminal. Only `_elastic` and `_rendezvous` import torch at their head, and are imported to start something.
"""
