"""What this package cannot do on some systems."""

import sys
import warnings

from tp_core.errors import ConfigError

__all__ = ["require_processes", "warn_of_platform"]

_ON_WINDOWS = (
    "tp-runner's worker processes need Linux or macOS; on Windows give engine='thread', engine='inline' or "
    "engine='ray', or work in WSL"
)


def warn_of_platform() -> None:
    """Warn at import of what does not work on this platform."""
    if sys.platform == "win32":
        warnings.warn(_ON_WINDOWS, RuntimeWarning, stacklevel=3)


def require_processes() -> None:
    """Refuse worker processes where there can be none.

    Raises:
        ConfigError: This is Windows.
    """
    if sys.platform == "win32":
        raise ConfigError(_ON_WINDOWS)
