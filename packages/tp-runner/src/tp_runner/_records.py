"""Log records of workers, in the parent."""

import logging

__all__ = ["handle_record"]


def handle_record(record: logging.LogRecord) -> None:
    """Give a worker's record to the parent's logger of that name."""
    logger = logging.getLogger(record.name)
    if logger.isEnabledFor(record.levelno):
        logger.handle(record)
