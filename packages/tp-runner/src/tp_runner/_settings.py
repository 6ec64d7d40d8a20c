"""How workers are run: the options of an engine, checked."""

from collections.abc import Mapping
from dataclasses import dataclass

from tp_runner._batching import Batching

__all__ = ["Settings"]


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything that is decided before the first worker starts.

    Attributes:
        start_method: ``"forkserver"``, ``"spawn"`` or ``"fork"``; processes only.
        preload: What the fork server imports before it forks; found out, not asked for.
        threads: How many threads each worker may compute with.
        ordered: Whether results come in the order of the items.
        queue_scale: How many items may be on their way for each worker; ``None`` to adapt.
        max_bytes: How many bytes may be on their way.
        on_error: ``"raise"`` a failure or ``"return"`` it in the item's place.
        retries: How often a failed item is tried again.
        restart: How often dead workers are started again in the pool's life.
        timeout_s: How long an item may take.
        batching: How items are put together.
        max_wait_s: How long an incomplete batch waits for more items.
        log_level: The level of log records that workers send.
        timeline: Whether what each worker does when is kept.
        resources: What each actor takes of a Ray cluster.
    """

    start_method: str = "forkserver"
    preload: tuple[str, ...] = ()
    threads: int = 1
    ordered: bool = True
    queue_scale: float | None = None
    max_bytes: int = 256 << 20
    on_error: str = "raise"
    retries: int = 0
    restart: int = 0
    timeout_s: float | None = None
    batching: Batching | None = None
    max_wait_s: float | None = None
    log_level: int = 30
    timeline: bool = False
    resources: Mapping[str, float] | None = None
