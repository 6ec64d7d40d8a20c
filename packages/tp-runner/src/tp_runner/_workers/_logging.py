"""The way of log records from a worker to the caller's loggers."""

import logging
from collections.abc import Callable

__all__ = ["RecordForwarder", "handle_record"]


def handle_record(record: logging.LogRecord) -> None:
    """Give a worker's record to the parent's logger of that name."""
    logger = logging.getLogger(record.name)
    if logger.isEnabledFor(record.levelno):
        logger.handle(record)


class RecordForwarder(logging.Handler):
    """Sends records to the parent, with the worker and its device."""

    def __init__(self, worker: int, device: str, send_record: Callable[[logging.LogRecord], None]) -> None:
        super().__init__()
        self._worker = worker
        self._device = device
        self._send_record = send_record

    def emit(self, record: logging.LogRecord) -> None:
        """Send ``record``; what cannot be pickled in it becomes text."""
        try:
            record.msg, record.args = record.getMessage(), None
            if record.exc_info:
                formatter = self.formatter or logging.Formatter()
                record.exc_text = formatter.formatException(record.exc_info)
                record.exc_info = None
            record.worker = self._worker
            record.device = self._device
            self._send_record(record)
        except Exception:  # noqa: BLE001 - logging's own way: a record never ends the program
            self.handleError(record)
