"""Loggers: what the numbers of a run are written to.

``CsvLogger`` and ``JsonLinesLogger`` need nothing but this package; ``TensorBoardLogger``, ``WandbLogger``,
``MlflowLogger`` and ``AimLogger`` need the extras ``tp-trainer[tensorboard]``, ``[wandb]``, ``[mlflow]`` and
``[aim]``. A custom logger is a subclass of :class:`tp_core.plugins.Logger`.
"""

from tp_core.internal import exports_of_stub

__getattr__, __dir__, __all__ = exports_of_stub(__name__)
