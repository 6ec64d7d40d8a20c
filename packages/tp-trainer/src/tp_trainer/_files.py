"""The trainer's models in files: saved, loaded, and exported as safetensors or adapters."""

import os
from pathlib import Path

from torch import nn
from tp_core.errors import ConfigError
from tp_core.state import check_weights_name

from tp_trainer._checkpoint._adapters import export_adapters, export_merged, is_adapter, load_adapter
from tp_trainer._checkpoint._model_files import export_model, load_model, save_model
from tp_trainer._preparation import Preparation
from tp_trainer._running._drift import compare_prepared


def _check_first(method: str, model: object) -> None:
    """Make sure that the first argument is the model, and not the path or the model's state."""
    if not isinstance(model, nn.Module):
        if isinstance(model, str):
            got = f"{type(model).__name__}: {model!r}"
        else:
            got = type(model).__name__
        msg = f"{method}() takes a model first, and then the path, got {got}; write {method}(model, path)"
        raise ConfigError(msg)


class ModelFiles:
    """Writes prepared models to files, and loads them.

    Args:
        preparation: Has the session, and prepares models.
    """

    def __init__(self, preparation: Preparation) -> None:
        self._preparation = preparation

    def save(self, model: nn.Module, path: str | os.PathLike[str]) -> None:
        """Write a model's state; see `Trainer.save_model`."""
        _check_first("save_model", model)
        if Path(path).suffix == ".safetensors":
            msg = (
                f"save_model() writes what torch.load reads, and {os.fspath(path)!r} would be read as "
                "safetensors; write export(model, path), or another name"
            )
            raise ConfigError(msg)
        prepared = self._preparation.prepare_model(model)
        compare_prepared(self._preparation, when="before save_model()")
        save_model(self._preparation.session, prepared, path)

    def load(self, model: nn.Module, path: str | os.PathLike[str], *, name: str | None) -> None:
        """Load a model's state, or an adapter's; see `Trainer.load_model`."""
        _check_first("load_model", model)
        prepared = self._preparation.prepare_model(model)
        session = self._preparation.session
        if is_adapter(Path(path)):
            load_adapter(session, prepared, Path(path), name=name)
        else:
            load_model(session, prepared, path, name=name)

    def export(
        self,
        model: nn.Module,
        path: str | os.PathLike[str],
        *,
        adapter: bool,
        merged: bool,
        max_file_nbytes: int | None,
    ) -> None:
        """Write weights for programs without tp; see `Trainer.export`."""
        _check_first("export", model)
        if adapter and (merged or max_file_nbytes is not None):
            other = "merged=True" if merged else "max_file_nbytes"
            msg = f"export() takes adapter=True or {other}: adapters are written alone, in one file each"
            raise ConfigError(msg)
        place = Path(path)
        if not adapter:
            check_weights_name(place)
        elif place.suffix == ".safetensors":
            msg = f"adapters are written into a folder, got {os.fspath(path)!r}, the name of a file"
            raise ConfigError(msg)
        prepared = self._preparation.prepare_model(model)
        session = self._preparation.session
        compare_prepared(self._preparation, when="before export()")
        if adapter:
            export_adapters(session, prepared, place)
        elif merged:
            export_merged(session, prepared, place, max_file_nbytes=max_file_nbytes)
        else:
            export_model(session, prepared, place, max_file_nbytes=max_file_nbytes)
