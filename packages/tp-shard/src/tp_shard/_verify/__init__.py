"""Whether a split model computes what the whole one does: both run, and are compared step by step.

The ranks are threads of this process (``_simulate``), so that no launcher is needed.
"""
