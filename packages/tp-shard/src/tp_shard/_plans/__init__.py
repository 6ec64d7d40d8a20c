"""Plans: their styles, their application to a finished model, and a summary of the result.

A plan is data: names of modules, and a style for each (``_styles``). ``_parallelize`` applies it. Modules of
users with code that meets shards get a mixin or hooks (``_modules``).
"""
