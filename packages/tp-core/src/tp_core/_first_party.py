"""The names of this project's distributions, for those who need not load what finds plugins."""

FIRST_PARTY = frozenset(
    {
        "tp-accelerate",
        "tp-context",
        "tp-core",
        "tp-data",
        "tp-dp-gather",
        "tp-launch",
        "tp-lightning",
        "tp-pipeline",
        "tp-ray",
        "tp-runner",
        "tp-shard",
        "tp-simulator",
        "tp-testing",
        "tp-trainer",
        "tp-tuple",
        "tp-verify",
    }
)
"""The distributions of this project: where names collide, theirs win."""
