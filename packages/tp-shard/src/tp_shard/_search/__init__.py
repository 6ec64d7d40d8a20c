"""Finding a plan for a model that was not written for this package.

By running it and looking at what meets what (``_trace``, ``_variants``, ``_prove``), by names and shapes
where it cannot be run (``_named``), or from the plan that a model of transformers brings
(``_transformers``). What is proposed is compared with the whole model, block by block.
"""
