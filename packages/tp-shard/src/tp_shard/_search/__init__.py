"""The search for a plan for a model that was not written for this package.

It runs the model and finds which layers feed which (``_trace``, ``_variants``, ``_prove``), or starts from
the plan of a transformers model (``_prove``). Each proposal is compared with the whole model, block by
block.
"""
