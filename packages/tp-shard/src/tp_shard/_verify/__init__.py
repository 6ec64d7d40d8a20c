"""The verification of a plan: the whole model and the split one both run, and are compared step by step.

The ranks are threads of this process (``_simulate``), so that no launcher is needed.
"""
