"""What to find out before hours are spent, without a trace: a learning rate, a batch size, what will fail."""

from tp_trainer.tuning._batch_size import largest_batch_size
from tp_trainer.tuning._dry_run import DryRun, dry_run
from tp_trainer.tuning._learning_rate import RangeTest, learning_rate_range_test

__all__ = ["DryRun", "RangeTest", "dry_run", "largest_batch_size", "learning_rate_range_test"]
