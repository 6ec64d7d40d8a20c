"""Which layouts a job fits in, and how long a step takes in each: from stand-ins and a machine's rates."""

from tp_trainer.planning._calibrate import calibrate
from tp_trainer.planning._machine import Links, Machine
from tp_trainer.planning._plan import Plan, PlannedLayout, StepTime, plan

__all__ = ["Links", "Machine", "Plan", "PlannedLayout", "StepTime", "calibrate", "plan"]
