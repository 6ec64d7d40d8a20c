"""Numbers and words from a launcher's variables, with messages that tell what to do."""

from collections.abc import Mapping
from dataclasses import dataclass

from tp_core.errors import LaunchEnvironmentError

__all__ = ["LauncherVariables", "VariableReader"]


@dataclass(frozen=True, slots=True)
class LauncherVariables:
    """The variables of one launcher.

    Attributes:
        names: All that are read.
        remedy: How to start a script so that they are set.
    """

    names: tuple[str, ...]
    remedy: str

    def reader(self, environ: Mapping[str, str]) -> "VariableReader":
        """Return what reads these variables from ``environ``."""
        return VariableReader(self, environ)


@dataclass(frozen=True, slots=True)
class VariableReader:
    """Reads the variables of one launcher from one environment."""

    variables: LauncherVariables
    environ: Mapping[str, str]

    def text(self, name: str) -> str:
        """Return a variable.

        Raises:
            LaunchEnvironmentError: The variable is not set, or empty.
        """
        value = self.environ.get(name, "").strip()
        if not value:
            problem = "is empty" if name in self.environ else "is not set"
            msg = f"{name} {problem}"
            raise self.error(msg)
        return value

    def number(self, name: str, *, default: int | None = None) -> int:
        """Return a variable as a whole number of at least 0.

        Args:
            name: The variable.
            default: For one that is not set; without it that is an error.

        Raises:
            LaunchEnvironmentError: The variable is not set, or not such a number.
        """
        if default is not None and name not in self.environ:
            return default
        value = self.text(name)
        if not value.isdecimal():
            msg = f"{name}={value!r} is not a whole number of at least 0"
            raise self.error(msg)
        return int(value)

    def error(self, problem: str) -> LaunchEnvironmentError:
        """Return an error with the problem, what was found, and what to do."""
        found = [name for name in self.variables.names if name in self.environ]
        values = ", ".join(f"{name}={self.environ[name]!r}" for name in found)
        unset = " ".join(name for name in found if not name.startswith("MASTER_"))
        msg = (
            f"{problem}; found {values}; {self.variables.remedy}, or run `unset {unset}` for a "
            "process by itself"
        )
        return LaunchEnvironmentError(msg)
