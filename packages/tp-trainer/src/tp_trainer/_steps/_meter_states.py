"""The states of the ranks' meters as that of one, for a resume with another number of ranks."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["added_states", "empty_state"]


def empty_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of a meter at the same step that has counted nothing."""
    return {**state, "samples": 0, "loss": [0.0, 0], "others": {}}


def added_states(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the state of a meter that has counted what all of these have."""
    names = {name for state in states for name in state["others"]}
    nothing = [0.0, 0]
    return {
        "step": states[0]["step"],
        "samples": sum(state["samples"] for state in states),
        "weighs": states[0]["weighs"],
        "loss": _added([state["loss"] for state in states]),
        "others": {n: _added([state["others"].get(n, nothing) for state in states]) for n in sorted(names)},
    }


def _added(pairs: Sequence[Sequence[float]]) -> list[float]:
    return [math.fsum(total for total, _ in pairs), math.fsum(weight for _, weight in pairs)]
