"""Ready-made callbacks: what many runs need beside the training itself."""

from tp_core.internal import exports_of_stub

__getattr__, __dir__, __all__ = exports_of_stub(__name__)
