"""Groups of ranks, and what passes between them.

A :class:`Group` is the ranks that hold one tensor together, seen from one of them (``_group``). Collectives
come plain and with gradients (``_collectives``); with debugging on, ranks compare what they are about to do
(``_debug``). Random numbers that differ between the ranks are drawn in ``_random``. What is replaced of torch
while there are groups is noted in ``_patches``.
"""
