"""Lightning's ``Trainer`` on tp's: it trains the ``LightningModule`` of a program as it is.

::

    fit(module, datamodule)                                          _trainer
      prepare_data, setup, configure_model, configure_optimizers     _module, _optimizers
      Trainer.loop of tp: order, position, checkpoints, signals, limits, loggers
        training_step            Trainer.run, and Trainer.backward; or manual, as it is written      _training
        log, log_dict            means over the samples of all ranks         _module_calls, _results
        validation_step, ...     after an epoch, or between two steps; each sample counts once     _evaluation

Nothing is imported from Lightning: any module with these methods is trained. A batch size is the whole job's,
as everywhere in tp, so that any number of devices gives the numbers of one.
"""

from typing import TYPE_CHECKING

from tp_core.plugins import lazy_exports

if TYPE_CHECKING:
    from tp_lightning._trainer import Trainer as Trainer

    __version__: str
else:
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        {
            "tp_lightning._trainer": ["Trainer"],
        },
        answers="tp_lightning._arguments",
    )
