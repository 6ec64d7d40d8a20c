"""Lightning's callbacks in tp's terms; their options that are not here are refused by name."""

from typing import Any

from tp_core.errors import ConfigError
from tp_core.plugins import Callback
from tp_trainer.callbacks import EarlyStopping, LearningRateMonitor

# Options of Lightning's callbacks that are here for some values, by their fields: those, and what to write.
_THRESHOLDS = ((None,), "call run.stop() in the on_validation_end of a tp_trainer.Callback")
_CALLBACK_OPTIONS: dict[str, dict[str, tuple[tuple[Any, ...], str]]] = {
    "EarlyStopping": {
        "stopping_threshold": _THRESHOLDS,
        "divergence_threshold": _THRESHOLDS,
        "strict": ((True,), "log the metric in each validation, or epoch"),
    },
    "LearningRateMonitor": {
        "logging_interval": ((None, "step"), "leave it out: the rates are logged with the steps"),
        "log_momentum": ((False,), "run.log(momentum=...) in the on_step_end of a tp_trainer.Callback"),
        "log_weight_decay": ((False,), "run.log(decay=...) in the on_step_end of a tp_trainer.Callback"),
    },
    "ModelCheckpoint": {
        "filename": ((None,), "leave it out: names have the step; find_checkpoint(folder, best=...)"),
        "auto_insert_metric_name": ((True,), "leave it out: names have the step"),
        "_enable_version_counter": ((True,), "leave it out: names have the step"),
        "save_last": ((None, False, True), "save_last=True: the newest one is kept, under its own name"),
        "save_top_k": ((-1, 0, 1), "save_top_k=1, the best one beside the newest, or -1, all of them"),
        "save_weights_only": ((False,), "trainer.save_checkpoint(path), after fit()"),
        "save_on_exception": ((False,), "every_n_train_steps=..., or train_time_interval=..."),
        "_save_on_train_epoch_end": ((None, True), "leave it out: an epoch is saved after its validation"),
    },
}
_NOT_NEEDED = ("ModelSummary", "ProgressBar", "RichModelSummary")


def sort_callbacks(callbacks: Any) -> tuple[list[Any], list[Callback], Any]:
    """Return callbacks with Lightning's hooks, tp's own, and a ``ModelCheckpoint``, of what was given."""
    theirs: list[Any] = []
    ours: list[Callback] = []
    checkpoints = None
    if callbacks is None:
        callbacks = []
    elif not isinstance(callbacks, list | tuple):
        callbacks = [callbacks]
    for callback in callbacks:
        kind = type(callback)
        if isinstance(callback, type | str):
            name = getattr(callback, "__name__", callback)
            msg = f"callbacks are objects, got {callback!r:.80}; make one: {name}(...)"
            raise ConfigError(msg)
        if isinstance(callback, Callback):
            ours.append(callback)
        elif not kind.__module__.startswith(("lightning.", "pytorch_lightning.")):
            theirs.append(callback)
        elif kind.__name__ == "EarlyStopping":
            ours.append(_early_stopping(callback))
        elif kind.__name__ == "LearningRateMonitor":
            _refuse_options(callback)
            ours.append(LearningRateMonitor())
        elif kind.__name__ == "ModelCheckpoint":
            if checkpoints is not None:
                msg = (
                    "a run has one ModelCheckpoint here; to save at several times, write "
                    "Trainer(checkpoint=Checkpoints('run', every_steps=..., every_epochs=...))"
                )
                raise ConfigError(msg)
            _refuse_options(callback)
            checkpoints = callback
        elif not kind.__name__.endswith(_NOT_NEEDED):
            successors = {"Timer": "Trainer(max_time=...)", "Callback": "a class of your own"}
            instead = successors.get(kind.__name__, "one of tp_trainer.callbacks")
            msg = f"Lightning's callback {kind.__name__} is not here; with tp, write {instead}"
            raise ConfigError(msg)
    return theirs, ours, checkpoints


def _refuse_options(theirs: Any) -> None:
    """Refuse the options of a callback of Lightning that are not here."""
    kind = type(theirs).__name__
    for field, (here, instead) in _CALLBACK_OPTIONS[kind].items():
        value = getattr(theirs, field, here[0])  # versions of Lightning differ in what they have
        if value not in here:
            name = field.removeprefix("_")
            msg = f"{kind}({name}={value!r}) is not here; with tp, {instead}"
            raise ConfigError(msg)


def _early_stopping(theirs: Any) -> EarlyStopping:
    _refuse_options(theirs)
    at_epochs = not theirs.monitor.startswith("val_")
    if theirs._check_on_train_epoch_end not in (None, at_epochs):
        period = "epoch" if at_epochs else "validation"
        msg = (
            f"EarlyStopping(check_on_train_epoch_end={not at_epochs}) is not here; with tp, leave it out: "
            f"{theirs.monitor!r} is checked after each {period}"
        )
        raise ConfigError(msg)
    return EarlyStopping(
        theirs.monitor,
        patience=theirs.patience,
        mode=theirs.mode,
        min_delta=abs(theirs.min_delta),  # there its sign depends on the mode
        check_finite=theirs.check_finite,
    )
