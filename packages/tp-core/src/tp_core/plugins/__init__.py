"""For authors of plugins: the contracts, what implements them, and the registry that they meet in.

A distribution joins by an entry point in the group ``tp.plugins`` that names a light module with
hook implementations; a script joins by ``registry.register(...)``.
"""

from tp_core._lazy import exports_of_stub

__getattr__, __dir__, __all__ = exports_of_stub(__name__)
