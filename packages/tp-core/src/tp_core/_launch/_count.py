"""How many processes a command starts on this host at most."""

from tp_core._launch._environment import available_cores
from tp_core.errors import ConfigError

__all__ = ["check_process_count"]

_PER_CORE = 16
_ANYWHERE = 256  # processes that mostly wait may be many more than cores


def check_process_count(option: str, count: int) -> None:
    """Refuse a number of processes that no host of this size can run, before the first is started.

    A number with a digit too many would take the whole machine away from everybody on it.

    Args:
        option: What it was given as, for the message.
        count: How many processes are to be started here.

    Raises:
        ConfigError: There are more than 16 for each core, and more than 256.
    """
    cores = available_cores()
    limit = max(_ANYWHERE, _PER_CORE * cores)
    if count > limit:
        msg = (
            f"{option} asks for {count} processes on this host of {cores} core{'s' * (cores > 1)}; at "
            f"most {limit} are started here"
        )
        raise ConfigError(msg)
