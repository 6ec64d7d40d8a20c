"""Tests before a long run, without side effects: of a learning rate, a batch size, and a whole run."""

from tp_trainer.tuning._batch_size import largest_batch_size
from tp_trainer.tuning._dry_run import DryRun, dry_run
from tp_trainer.tuning._learning_rate import RangeTest, learning_rate_range_test

__all__ = ["DryRun", "RangeTest", "dry_run", "largest_batch_size", "learning_rate_range_test"]
