"""The contract of a session, by purpose: ranks, gradients, state, and what a backend prepares and runs."""

from tp_core._contracts._session._ranks import ReduceOp
from tp_core._contracts._session._session import Session, StepOutput

__all__ = ["ReduceOp", "Session", "StepOutput"]
