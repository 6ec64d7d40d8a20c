"""The trainer: one script for one device, many devices or many machines."""

from tp_trainer._trainer._model_files import ModelFiles
from tp_trainer._trainer._own_steps import OwnSteps
from tp_trainer._trainer._preparing import Preparing
from tp_trainer._trainer._runs import Runs
from tp_trainer._trainer._whole_sets import WholeSets

__all__ = ["Trainer"]


class Trainer(Preparing, OwnSteps, Runs, WholeSets, ModelFiles):
    """Runs one training script on the best backend that is installed, and says why that one.

    Nothing is started before a model is there to be trained: the backend is chosen when
    :meth:`fit` or :meth:`prepare` is called. Who this process is (``rank``, ``device``) is known
    before. A trainer is a context manager; leaving it ends what it started.

    Args:
        backend: The name of the backend, or "auto" for the best that fits. The variable
            ``TP_BACKEND`` decides where it is "auto".
        devices: What to run on, as :func:`tp_core.resolve_devices` takes it. Under a launcher
            they are the devices of one host, one for each of its processes.
        seed: Seeds Python, numpy (if it is loaded) and torch now, and orders the data. ``None``
            leaves the generators alone; rank 0 then chooses how the data are ordered.
        loss: Whether a step's loss is the "mean" over its samples, or their "sum".
        precision: "fp32"; "bf16-mixed" or "fp16-mixed", where a step runs under autocast and fp16
            scales the loss; or "bf16-true", where the model and the batches are in bfloat16.
        accumulate: How many batches :meth:`fit` puts into one optimizer step. Gradients are weighed
            by samples, or by what the step says, as if the batches were one.
        compile: Whether models are compiled, in place, where the backend gains most from it.
        options: Options of backends, used if that one is chosen: ``DdpOptions(static_graph=True)``, a list
            of such objects, or a dict by backends' names, ``{"ddp": {"static_graph": True}}``.
        progress: Whether rank 0 shows how far a run is. "auto" is a bar on a terminal, and elsewhere a
            line for each epoch; with ``True`` there are lines in between, too; ``False`` shows nothing.
        plugins: The registry to choose from; that of the process by default.

    Raises:
        DeviceError: The devices do not exist.
        LaunchEnvironmentError: The launcher's variables are incomplete.
        ConfigError: An argument has a wrong value.
        SelectionError: No backend of that name is installed.
        PluginError: The plugin that brings the backend is broken or blocked.

    Source: for "fp16-mixed" Micikevicius et al., "Mixed Precision Training", 2018, section 3.

    Example:
        >>> trainer = Trainer(seed=0)
        >>> trainer.fit(model, optimizer, loader, step=step, epochs=3)  # doctest: +SKIP
    """
