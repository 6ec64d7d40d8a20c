"""What to find out before hours are spent, without a trace in the state: a learning rate, a batch size."""

from tp_trainer.tuning._batch_size import largest_batch_size
from tp_trainer.tuning._learning_rate import RangeTest, learning_rate_range_test

__all__ = ["RangeTest", "largest_batch_size", "learning_rate_range_test"]
