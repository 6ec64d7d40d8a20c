"""Finding a plan for a model that was not written for this package.

By running it and looking at what meets what (``_trace``, ``_variants``, ``_prove``), or from the plan that a
model of transformers brings (``_transformers``). What is proposed is compared with the whole model, block by
block.
"""
