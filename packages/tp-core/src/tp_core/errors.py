"""Every error that the tp packages raise on purpose.

::

    TpError
    ├── DeviceError              ValueError      a device request that cannot be met here
    ├── LaunchEnvironmentError   RuntimeError    launcher variables that contradict or miss each other
    ├── TransferError            TypeError       an object that cannot be moved
    │   └── CycleError           ValueError      a container that contains itself
    ├── ConfigError              ValueError      an option with a wrong name, type or value
    ├── PluginError              RuntimeError    a plugin that is broken, or asked for and not usable
    │   ├── ContractError        TypeError       a plugin that breaks the hook contract
    │   └── DuplicateNameError   ValueError      one name, two plugins
    ├── SelectionError           LookupError     no backend fits, or the wanted one does not
    ├── ModelError               TypeError       a model that cannot be prepared as it is
    ├── LoaderError              TypeError       a data loader that cannot be prepared as it is
    ├── StepError                TypeError       a training step that returned no usable loss
    ├── NonFiniteLossError       ArithmeticError a loss that is NaN or infinite
    ├── DisagreementError        RuntimeError    ranks that were given different things
    ├── RankFailedError          RuntimeError    another process of the job failed
    └── StateError               RuntimeError    saved state that cannot be read or does not fit

Each is also a subclass of the builtin in the second column, so that code which catches that keeps
working. A message says what was wrong, what was given and what to do about it. A traceback ends with the
command that prints more, such as ``tp explain state-error``, or with an address, where `DOCUMENTS` has one;
it is a note (PEP 678), not part of the message.
"""

import re

__all__ = [
    "ConfigError",
    "ContractError",
    "CycleError",
    "DeviceError",
    "DisagreementError",
    "DuplicateNameError",
    "LaunchEnvironmentError",
    "LoaderError",
    "ModelError",
    "NonFiniteLossError",
    "PluginError",
    "RankFailedError",
    "SelectionError",
    "StateError",
    "StepError",
    "TpError",
    "TransferError",
]


DOCUMENTS = ""
"""The address of the published documents, such as ``https://example.org/tp``; "" where there are none."""


class TpError(Exception):
    """The root of all errors that the tp packages raise on purpose."""

    def __init__(self, *args: object) -> None:
        # Not super's: an error that is of the type of a user's exception, too, would call the other __init__.
        Exception.__init__(self, *args)
        page, _, name = self.anchor().partition("#")
        if DOCUMENTS:
            where = f"{DOCUMENTS}/{page}.html#{name}"
        else:
            where = f"tp explain {name}"
        self.add_note(f"More: {where}")

    @classmethod
    def anchor(cls) -> str:
        """Return where the documents explain this error: ``errors#state-error``.

        A class that no ``errors`` module of tp defines is explained by the nearest one above it that is.
        """
        named = next(kind for kind in cls.__mro__ if re.fullmatch(r"tp_\w+\.errors", kind.__module__))
        return "errors#" + re.sub(r"(?<=[a-z])(?=[A-Z])", "-", named.__name__).lower()


class DeviceError(TpError, ValueError):
    """A device request that cannot be met on this machine."""


class LaunchEnvironmentError(TpError, RuntimeError):
    """Launcher variables that are missing, malformed or contradict each other."""


class TransferError(TpError, TypeError):
    """An object that cannot be moved to the device."""


class CycleError(TransferError, ValueError):
    """A container that contains itself."""


class ConfigError(TpError, ValueError):
    """An option with a wrong name, type or value."""


class PluginError(TpError, RuntimeError):
    """A plugin that is broken, or that was asked for and cannot be used."""


class ContractError(PluginError, TypeError):
    """A plugin that breaks the hook contract or was built for another major version of it."""


class DuplicateNameError(PluginError, ValueError):
    """Two plugins that bring the same name."""


class SelectionError(TpError, LookupError):
    """No backend fits the job, or the one that was asked for does not."""


class ModelError(TpError, TypeError):
    """A model that cannot be prepared as it is."""


class LoaderError(TpError, TypeError):
    """A data loader that cannot be prepared as it is."""


class StepError(TpError, TypeError):
    """A training step that returned no usable loss."""


class NonFiniteLossError(TpError, ArithmeticError):
    """A loss that is NaN or infinite."""


class DisagreementError(TpError, RuntimeError):
    """Ranks of one job that were given different things."""


class RankFailedError(TpError, RuntimeError):
    """Another process of the same job failed."""


class StateError(TpError, RuntimeError):
    """Saved state that cannot be read, or does not fit what it is loaded into."""
