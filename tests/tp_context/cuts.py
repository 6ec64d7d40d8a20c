"""Sequences that are cut over ranks, without a model, its session and the checks of both."""

# Private: a session compares ranks, of which some are missing here.
from tp_context._slices import Cut, Cuts, activate

__all__ = ["activate", "cuts_of"]


def cuts_of(*lengths, rank, size, way="all-gather"):
    """Return the cuts of sequences of these lengths, which `activate` makes those of a step."""
    return Cuts([Cut(n, rank, size, None) for n in dict.fromkeys(lengths)], way)
