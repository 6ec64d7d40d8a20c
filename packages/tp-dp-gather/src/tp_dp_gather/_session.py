"""The session of the backend ``dp-gather``, and its steps with models that compute their own loss."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from torch import Tensor, nn
from tp_core import to_device, tree_leaves
from tp_core.data import LoadedBatches, LossReduction, Parts, StepOutput, combine_outputs, step_identity
from tp_core.errors import ConfigError, StepError
from tp_core.jobs import whole_model_arguments
from tp_core.plugins import Job, Session
from tp_core.replicas import autocast_like_first

from tp_dp_gather._data_parallel import DataParallel
from tp_dp_gather._left_values import check_left_values
from tp_dp_gather._options import GatherOptions

Step = Callable[[nn.Module, Any], StepOutput]
Calls = Sequence[Sequence[Any]]
"""The outputs of the parts, for each forward of a step."""
_INSTEAD = (
    'choose their dimension, options={"dp-gather": {"dim": ...}}, or take Trainer(backend="tuple"), which '
    "collates the samples of each device apart"
)
"""What to do where the samples of a batch are along another dimension."""


class GatherSession(Session):
    """Session that runs the step once per batch; the model splits its input and gathers its output."""

    def __init__(self, job: Job, options: GatherOptions) -> None:
        super().__init__(job)
        self._options = options
        self.loaded = self._batches = LoadedBatches(options.dim)
        # The last step that ran on several devices, and whether its model returned a loss for each of them.
        self._last_step: tuple[Step, bool] | None = None
        self._calls = 0
        self._checked: set[object] = set()  # the identities of steps

    def prepare_model(self, model: nn.Module) -> nn.Module:
        options = self._options
        prepared = DataParallel(
            super().prepare_model(model),
            list(self.job.devices),
            dim=options.dim,
            except_keywords=options.except_keywords,
            samples=options.samples,
            broadcast=options.broadcast,
        )
        prepared.scattering = replace(
            prepared.scattering, loaded=self._batches, backend="dp-gather", instead=_INSTEAD
        )
        return prepared

    def compile_model(self, model: nn.Module) -> None:
        if isinstance(model, DataParallel):
            model.replicas.compile(**whole_model_arguments(self.job, "dp-gather"))
        else:
            super().compile_model(model)

    def refresh(self, model: nn.Module) -> None:
        if isinstance(model, DataParallel):
            model.refresh()

    def run(self, step: Step, model: nn.Module, batch: Any) -> StepOutput:
        """Run the step on the whole batch.

        A model may compute its loss itself, as models of transformers do with labels: then the devices'
        losses come as a vector. The step runs once more for each device's part, with the model's recorded
        output for it. The outputs are combined by the parts' weights, or samples.

        Collectives: those of the model's forward and backward, see `DataParallel`.
        """
        # Recording keeps the outputs of all parts alive until the step ends: only where they are needed. A
        # step may do something else later, so that its first call, the second, the fourth and so on are seen.
        self._calls += 1
        is_seen = not self._calls & (self._calls - 1)
        last = self._last_step
        is_known = last is not None and last[0] is step and not last[1]
        if not isinstance(model, DataParallel) or (is_known and not is_seen):
            return step(model, batch)
        with model.recorded() as calls:
            output = step(model, batch)
        self._check_left_values(step, model, output, is_seen=is_seen)
        if not any(len(parts) > 1 for parts in calls):
            return output
        self._last_step = step, _has_loss_of_each_part(output, calls)
        if not self._last_step[1]:
            return output
        with self._batches.computing_part("in a step with a loss of each device"):
            return _output_by_parts(step, model, batch, calls, loss=self.job.loss)

    def _check_left_values(
        self, step: Step, model: DataParallel, output: StepOutput, *, is_seen: bool
    ) -> None:
        """Check the first loss of a step, or of those that a loop makes anew for each batch."""
        if isinstance(output, Mapping):
            loss = output.get("loss")
        else:
            loss = output
        identity = step_identity(step)
        forwards, model.first_outputs = model.first_outputs, []
        is_due = forwards and (is_seen or identity not in self._checked)
        if is_due and isinstance(loss, Tensor) and loss.grad_fn is not None:
            check_left_values(loss, forwards, model.module)
            self._checked.add(identity)

    def check_in_step(self, what: str, *, may_meet: bool = False) -> None:  # noqa: ARG002 - parts never meet
        for where in tuple(self._batches.computing.values()):  # a copy: threads add and remove entries
            msg = (
                f"{what} was called {where}, where each device has its part of the batch; call it in the "
                "step, on what the model returns of each sample, as the step sees the whole batch, or take "
                "Trainer(backend='tuple')"
            )
            raise StepError(msg)

    def unwrap(self, model: nn.Module) -> nn.Module:
        inner: nn.Module = model.module if isinstance(model, DataParallel) else model
        return inner


def _has_loss_of_each_part(output: Any, calls: Calls) -> bool:
    """Return whether a step's loss has an element for each part, because the model returned scalars."""
    if isinstance(output, Mapping):
        loss = output.get("loss")
    else:
        loss = output
    if not isinstance(loss, Tensor) or loss.dim() != 1:
        return False
    return {len(parts) for parts in calls} == {len(loss)} and any(
        isinstance(leaf, Tensor) and not leaf.dim() for parts in calls for leaf in tree_leaves(parts[0])
    )


def _output_by_parts(
    step: Step, model: DataParallel, batch: Any, calls: Calls, *, loss: LossReduction
) -> StepOutput:
    """Return what the step returns for the whole batch, from what it returns for each part.

    The model does not run again: the step gets its recorded output for the part. So the part's "weight", or
    its number of samples, says how much the part's loss counts.
    """
    count = len(calls[0])
    cause: ConfigError | None = None
    sizes: list[int] = []
    try:
        sizes = model.scattering.sizes({"batch": batch}, most=count)
        parts = [part["batch"] for part in model.scattering.parts({"batch": batch}, sizes)]
    except ConfigError as error:
        cause = error
    if cause is not None or len(sizes) != count:
        why = "" if cause is None else f" ({cause})"
        msg = (
            f"the model computes its loss itself, on {count} devices, and the batch cannot be split like the "
            f"model's input{why}, so that it is not known how much each loss counts; compute the loss in the "
            "step, from the model's other outputs, or take a backend that runs the step on each part "
            "('tuple', 'ddp')"
        )
        raise StepError(msg) from cause
    devices = model.replicas.devices
    outputs = []
    for i, part in enumerate(parts):
        replay = _Replay(model, [outputs[i] for outputs in calls])
        with autocast_like_first(devices):
            outputs.append(step(cast("nn.Module", replay), to_device(part, devices[i])))
    combined: StepOutput = combine_outputs(outputs, Parts(parts, counts=sizes), loss=loss, device=devices[0])
    return combined


class _Replay:
    """Stand-in for the model in a step: it returns the recorded outputs of one part."""

    def __init__(self, model: DataParallel, outputs: Sequence[Any]) -> None:
        self._model = model
        self._outputs = iter(outputs)

    def __call__(self, *_: Any, **__: Any) -> Any:
        for output in self._outputs:
            return output
        msg = (
            "the step calls the model more often for a part of the batch than for the whole; where a model "
            "computes its loss itself, take a backend that runs the step on each part ('tuple', 'ddp')"
        )
        raise StepError(msg)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)
