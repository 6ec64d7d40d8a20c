"""What the tp packages share among themselves: it may change with any version."""

from tp_core._lazy import exports_of_stub

__getattr__, __dir__, __all__ = exports_of_stub(__name__)
