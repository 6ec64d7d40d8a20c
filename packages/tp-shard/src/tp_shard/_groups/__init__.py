"""Groups of ranks, and the collectives between them.

A :class:`Group` is the ranks that hold one tensor together, seen from one of them (``_group``). Collectives
come plain and as autograd functions (``_collectives``). In debug mode the ranks compare each collective
before they call it (``_debug``). Random numbers that differ between the ranks are drawn in ``_random``.
``_patches`` lists the functions of torch that are replaced while there are groups.
"""
