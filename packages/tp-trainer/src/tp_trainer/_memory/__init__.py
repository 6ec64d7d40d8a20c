"""Estimates of a job's memory, from one step on tensors without memory."""

from tp_trainer._memory._job_memory import StepParts as StepParts
from tp_trainer._memory._job_memory import add_memory as add_memory
from tp_trainer._memory._job_memory import estimate_job as estimate_job
from tp_trainer._memory._memory_table import MemoryTable as MemoryTable
from tp_trainer._memory._memory_table import parse_nbytes as parse_nbytes
from tp_trainer._memory._memory_table import resized as resized
from tp_trainer._memory._memory_table import row_count_of as row_count_of
from tp_trainer._memory._out_of_memory import explain_out_of_memory as explain_out_of_memory
from tp_trainer._memory._out_of_memory import is_out_of_memory as is_out_of_memory
from tp_trainer._memory._step_footprint import measure_footprint as measure_footprint
