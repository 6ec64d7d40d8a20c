"""Sequences that are cut over ranks, without a model, its session and the checks of both."""

# Private: a session compares ranks, of which some are missing here.
from tp_context._slices import Cut, Cuts
from tp_context._split_state import split_states

__all__ = ["activate", "cuts_of"]


def cuts_of(*lengths, rank, size, algorithm="all-gather"):
    """Return the cuts of sequences of these lengths, which `activate` makes those of a step."""
    return Cuts([Cut(n, rank, size, None) for n in dict.fromkeys(lengths)], algorithm)


def activate(cuts):
    """Return a context in which a step runs on slices of these cuts."""
    return split_states.changed(cuts=cuts)
