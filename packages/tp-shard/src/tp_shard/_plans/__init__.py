"""Plans: what they say of a module, how they are applied to a finished model, and what became of it.

A plan is data: names of modules, and a style for each (``_styles``); ``_parallelize`` applies it. Modules of
others whose own code meets shards get a mixin (``_local``) or hooks (``_hooks``).
"""
