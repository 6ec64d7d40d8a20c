"""DataParallel that gathers everything, nothing, or all but some keys of a module's outputs."""

from tp_core.internal import exports_of_stub

__getattr__, __dir__, __all__ = exports_of_stub(__name__)
