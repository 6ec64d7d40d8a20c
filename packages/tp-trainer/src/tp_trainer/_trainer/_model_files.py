"""Models in files: states, weights for other programs."""

import os

from torch import nn

from tp_trainer._trainer._base import TrainerBase

__all__ = ["ModelFiles"]


class ModelFiles(TrainerBase):
    """Writes and reads models, on all ranks together."""

    def save_model(self, model: nn.Module, path: str | os.PathLike[str]) -> None:
        """Write the model's state, with the plain model's names; call it on every rank.

        A crash while it is written leaves the old file as it was.

        Raises:
            OSError: The file cannot be written; on every rank.

        Collectives: the backend's gathering of the state, one broadcast.
        """
        from tp_trainer._checkpoint._model_files import save_model

        prepared = self._prepare_model(model)
        save_model(self.session, prepared, path)

    def load_model(self, model: nn.Module, path: str | os.PathLike[str], *, name: str | None = None) -> None:
        """Load what :meth:`save_model` wrote, on this or another backend; call it on every rank.

        So are weights that :meth:`export` wrote, or another program: a safetensors file, an index of several,
        or their folder; and the folder of a checkpoint, of a run or of ``tp_shard.save_sharded``.

        Args:
            model: The model.
            path: The file or folder.
            name: Which model of a checkpoint that has several: as it was called in ``state={...}``.

        Raises:
            ConfigError: ``name`` is given for what is not the checkpoint of several models.
            FileNotFoundError: The file does not exist.
            StateError: The file is damaged, or is of another model; the model is untouched.
        """
        from tp_trainer._checkpoint._model_files import load_model

        prepared = self._prepare_model(model)
        load_model(self.session, prepared, path, name=name)

    def export(
        self, model: nn.Module, path: str | os.PathLike[str], *, max_file_nbytes: int | None = None
    ) -> None:
        """Write the weights as safetensors files, which are loaded without tp; call it on every rank.

        ``model.load_state_dict(safetensors.torch.load_file(path))`` loads it into the plain model. Tied
        weights are written under each of their names. A crash while it is written leaves the old file
        as it was. One tensor at a time is whole in memory, if the backend splits them.

        Args:
            model: The model.
            path: The file, ``model.safetensors``.
            max_file_nbytes: The largest size of a file in bytes, from which on there are several, such as
                ``model-00001-of-00003.safetensors``, and an index, as Hugging Face's libraries have it.

        Raises:
            ConfigError: There are several files, and ``path`` does not end in ".safetensors".
            OSError: A file cannot be written; on every rank.
            StateError: The model's state holds something that is not a tensor.

        Collectives: the backend's gathering of the state, one broadcast.
        """
        prepared = self._prepare_model(model)
        from tp_trainer._checkpoint._model_files import export_model

        export_model(self.session, prepared, path, max_file_nbytes=max_file_nbytes)
