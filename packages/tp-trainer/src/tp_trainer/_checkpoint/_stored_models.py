"""Models on the disk that are not whole checkpoints, under the names that checkpoints have."""

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor
from tp_core.errors import ConfigError
from tp_core.plugins import TensorSlice
from tp_core.state import StoredTensors, TensorInfo, fill_from_whole

__all__ = ["MODEL", "OneOfSeveral", "StateInAFile"]

MODEL = "model."
"""What is put before the names of a model's tensors."""


class StateInAFile(StoredTensors):
    """A state under plain names, mapped: of each tensor a rank reads what it holds."""

    def __init__(self, path: Path, state: Mapping[str, Tensor]) -> None:
        self.path, self._state = path, state
        self.infos = {MODEL + n: TensorInfo(tuple(t.shape), t.dtype) for n, t in sorted(state.items())}

    def fill(self, targets: Mapping[str, Tensor | TensorSlice]) -> None:
        """Fill whole tensors, or a rank's slices of them; names and shapes are known to fit."""
        for name, target in targets.items():
            fill_from_whole(target, self._state[name.removeprefix(MODEL)])


class OneOfSeveral(StoredTensors):
    """The model of one name in the checkpoint of several, under its own names.

    Raises:
        ConfigError: There is no model of that name.
    """

    def __init__(self, whole: StoredTensors, name: str) -> None:
        self._whole, self._prefix = whole, f"{MODEL}{name}."
        found = {
            n.removeprefix(self._prefix): t for n, t in whole.infos.items() if n.startswith(self._prefix)
        }
        if not found:
            models = {n.removeprefix(MODEL).partition(".")[0] for n in whole.infos if n.startswith(MODEL)}
            msg = f"{whole.path} has no model {name!r}; the names in it begin with {sorted(models)}"
            raise ConfigError(msg)
        self.path, self.infos = whole.path, {MODEL + n: info for n, info in found.items()}

    def fill(self, targets: Mapping[str, Tensor | TensorSlice]) -> None:
        """Fill whole tensors, or a rank's slices of them; names and shapes are known to fit."""
        self._whole.fill({self._prefix + n.removeprefix(MODEL): target for n, target in targets.items()})
