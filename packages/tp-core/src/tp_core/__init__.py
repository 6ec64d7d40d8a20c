"""What users of the tp packages share: devices, transfer, the launch environment, errors.

What authors of plugins need is in `tp_core.plugins`, what the tp packages share among themselves in
`tp_core.internal`. Names are imported when they are first used: most of them need torch, which takes most
of a second, and some of those who import this package, such as worker processes, need none of it.
"""

from tp_core._lazy import exports_of_stub

__getattr__, __dir__, __all__ = exports_of_stub(__name__)
