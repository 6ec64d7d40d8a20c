"""The launcher: ``tp launch``, and ``launch()`` for programs.

torch's elastic launcher starts the processes, as in ``torchrun``. This package adds checks before anything
starts, whole lines from every rank, and a short report on the rank that failed first. Only `_elastic`
imports torch at the top; it is imported to start processes.
"""
