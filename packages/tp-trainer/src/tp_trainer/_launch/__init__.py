"""The launcher: ``tp launch``, ``launch()`` for programs, and jobs in the background.

torch's elastic launcher starts the processes, as in ``torchrun``. This package adds checks before anything
starts, whole lines from every rank, a short report on the rank that failed first, and jobs that outlive the
terminal. Only `_elastic` and `_rendezvous` import torch at the top; they are imported to start processes.
"""
