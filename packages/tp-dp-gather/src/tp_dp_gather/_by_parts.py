"""Steps whose model computes its loss itself: one loss for each device, of which one has to be made."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from torch import Tensor, nn
from tp_core import recursive_to, tree_leaves
from tp_core.errors import ConfigError, StepError
from tp_core.plugins import LossReduction, Parts, StepOutput, combine_outputs

from tp_dp_gather._data_parallel import DataParallel

__all__ = ["has_loss_of_each_part", "output_by_parts"]

Step = Callable[[nn.Module, Any], StepOutput]
Calls = Sequence[Sequence[Any]]
"""For each forward of a step the outputs of its parts."""


def has_loss_of_each_part(output: Any, calls: Calls) -> bool:
    """Whether a step's loss has an element for each part, because the model returned scalars.

    Args:
        output: What the step returned.
        calls: What the model returned to it.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if not isinstance(loss, Tensor) or loss.dim() != 1:
        return False
    return {len(parts) for parts in calls} == {len(loss)} and any(_has_scalar(parts[0]) for parts in calls)


def output_by_parts(
    step: Step, model: DataParallel, batch: Any, calls: Calls, *, loss: LossReduction
) -> StepOutput:
    """Return what the step returns for the whole batch, from what it returns for each part.

    The model is not run again: the step gets what it returned for the part. So the part's "weight", or
    its number of samples, says how much the part's loss counts.

    Args:
        step: The user's step.
        model: The wrapper that has made the parts.
        batch: The whole batch.
        calls: What the model returned to the step, for each of its calls.
        loss: Whether losses are means or sums.

    Raises:
        StepError: The batch cannot be split as the model's input was, or the step does not call the model
            for a part as it did for the whole.
    """
    count = len(calls[0])
    try:
        sizes = model.scattering.sizes(batch, most=count)
        parts = model.scattering.parts(batch, sizes)
    except ConfigError as error:
        sizes = []
        cause: ConfigError | None = error
    else:
        cause = None
    if len(sizes) != count:
        msg = (
            f"the model computes its loss itself, on {count} devices, and the batch cannot be split like the "
            "model's input, so that it is not known how much each loss counts; compute the loss in the step, "
            "from the model's other outputs, or take a backend that runs the step on each device's part "
            "('tuple', 'ddp')"
        )
        raise StepError(msg) from cause
    devices = model.replicas.devices
    outputs = []
    for i, part in enumerate(parts):
        replay = _Replay(model, [outputs[i] for outputs in calls])
        placed = recursive_to(part, devices[i], non_blocking=devices[i].type != "cpu")
        outputs.append(step(cast("nn.Module", replay), placed))
    combined: StepOutput = combine_outputs(outputs, Parts(parts, counts=sizes), loss=loss, device=devices[0])
    return combined


class _Replay:
    """Stands for the model in a step and returns what it has returned for one part."""

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


def _has_scalar(output: Any) -> bool:
    return any(isinstance(leaf, Tensor) and not leaf.dim() for leaf in tree_leaves(output))
