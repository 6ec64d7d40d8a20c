from tp_core.plugins import Logger as Logger
from tp_core.plugins import RunInfo as RunInfo

from tp_trainer.loggers._aim import AimLogger as AimLogger
from tp_trainer.loggers._csv import CsvLogger as CsvLogger
from tp_trainer.loggers._jsonl import JsonLinesLogger as JsonLinesLogger
from tp_trainer.loggers._mlflow import MlflowLogger as MlflowLogger
from tp_trainer.loggers._reading import LoggedRun as LoggedRun
from tp_trainer.loggers._reading import read_run as read_run
from tp_trainer.loggers._tensorboard import TensorBoardLogger as TensorBoardLogger
from tp_trainer.loggers._wandb import WandbLogger as WandbLogger
