"""The trace of a batch: which rank computed what, and when."""

import json
from collections.abc import Sequence
from pathlib import Path

from tp_core.output import get_logger

from tp_pipeline._schedule import Span, idle_share

log = get_logger("tp_pipeline")

_TRACED_BATCH = 3
"""The batch that is traced; earlier ones include warm-up."""


class BatchTrace:
    """Writes one batch into a file.

    Args:
        path: The file.
    """

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._batches = 0

    def add(self, spans: Sequence[Span]) -> None:
        """Note that a batch has run, and write its work if it is the one to trace."""
        self._batches += 1
        if self._batches == _TRACED_BATCH:
            self._write(spans)
            log.info("idle share of the ranks in batch %d: %.1f %%", _TRACED_BATCH, 100 * idle_share(spans))

    def _write(self, spans: Sequence[Span]) -> None:
        """Write a trace of Chrome: a row for each rank, times in microseconds."""
        began = min(span.begin for span in spans)
        kinds = {"F": "forward", "B": "backward", "I": "backward (inputs)", "W": "backward (weights)"}
        events: list[dict[str, object]] = []
        for rank in sorted({span.rank for span in spans}):
            label = {"name": f"rank {rank}"}
            events.append({"name": "thread_name", "ph": "M", "pid": 0, "tid": rank, "args": label})
        label = {"name": "stages of a batch"}
        events.append({"name": "process_name", "ph": "M", "pid": 0, "args": label})
        for span in spans:
            work = span.work
            event = {
                "name": f"{kinds[work.kind]} {work.part}",
                "cat": f"stage {work.stage}",
                "ph": "X",
                "ts": (span.begin - began) * 1e6,
                "dur": (span.end - span.begin) * 1e6,
                "pid": 0,
                "tid": span.rank,
                "args": {"stage": work.stage, "micro-batch": work.part},
            }
            events.append(event)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
