"""What a checkpoint holds of a model and its optimizer: named tensors, however they are split."""

from tp_core._lazy import exports_of_stub

__getattr__, __dir__, __all__ = exports_of_stub(__name__)
