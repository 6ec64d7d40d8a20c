"""The backend that splits each sequence over ranks."""

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from tp_core.errors import ConfigError, ModelError
from tp_core.jobs import Axis, Footprint, Layout, MemoryNeed, divisors, replicated_memory
from tp_core.plugins import Backend, Job, RanksBackend, Verdict, registry

from tp_context._options import ContextOptions

if TYPE_CHECKING:  # backends that are not chosen cost nothing
    from tp_context._session import ContextSession


class ContextBackend(RanksBackend[ContextOptions]):
    """Runs one process per device: groups of them share each sequence, and the groups divide the samples."""

    name: ClassVar[str] = "context"
    options_type = ContextOptions
    self_test_options: ClassVar[Mapping[str, object]] = {"sequence": {}}  # its batches have none

    def assess_ranks(self, job: Job) -> Verdict:
        """Fit what the backend of the weights fits, below all backends that keep sequences whole."""
        traits, size = job.traits, job.environment.world_size
        options = self.parse_options(job)
        context = ranks_of_a_sequence(options, size)
        weights, inner = self._weights(job)
        held = ""
        if weights is not None:
            verdict = weights.assess(inner)
            if not verdict.is_fit:
                return Verdict.unfit(f"weights={weights.name!r}: {verdict.reason}", remedy=verdict.remedy)
            held = f"; weights by {weights.name!r}: {verdict.reason}"
        elif traits is not None and (traits.has_dtensors or traits.has_sharded_parameters):
            return Verdict.unfit(
                "the model has split parameters, and each rank here has whole ones",
                remedy="give the plain model, or the option weights='shard' for layers of tp-shard",
            )
        if options.context == -1 and weights is not None:
            ranks = "all"
        else:
            ranks = str(context)
        return Verdict.fits(
            10,
            f"each sequence split over {ranks} of {size} processes, with attention by {options.attention!r}, "
            f"for sequences that one device has no memory for; ddp is faster where they fit{held}",
        )

    def estimate_memory(self, job: Job) -> MemoryNeed | None:
        """Return the memory of a rank: its weights, and its slices of its group's sequences.

        A group has as many times the samples of a rank as it has ranks, and cuts each into as many slices: so
        activations shrink with the ranks also where a batch has fewer samples than there are ranks. What
        attention exchanges is added: by all-gather whole keys and values, and their gradients. So are scores,
        where no fused kernel of torch can do it.
        """
        kernels = ""
        if job.footprint is not None:
            options = self.parse_options(job)
            context = ranks_of_a_sequence(options, job.environment.world_size)
            kernels, scores = _scores(job.footprint, context, options.attention, job.devices[0].type)
            footprint = _sliced(job.footprint, context, options.attention, scores)
            job = replace(job, footprint=footprint)
        weights, inner = self._weights(job)
        if weights is not None:
            need = weights.estimate_memory(inner)
        elif job.footprint is None:
            need = None
        else:
            need = replicated_memory(job, job.footprint, keeps_gradients=True)
        if need is None:
            return None
        return replace(need, kernels=kernels)

    def layouts(self, job: Job) -> Iterable[Layout]:
        """Yield each number of ranks that share a sequence, with each backend that can hold the weights.

        Raises:
            ConfigError: The step has no attention of torch's, of which ranks would exchange keys and values.
        """
        size, footprint = job.environment.world_size, job.footprint
        if footprint is not None and footprint.activations is not None and not footprint.attentions:
            msg = "the step calls no attention of torch, whose keys and values the ranks would exchange"
            raise ConfigError(msg)
        for context in divisors(size):
            options = {"context": {"context": context, "weights": "whole"}}
            yield Layout(axes={"data": size // context, "context": context}, options=options)
        for contribution in registry.backends():
            backend = contribution.item
            if not backend.shares_samples or backend.name == "ddp":  # which is "whole"
                continue
            with suppress(ModelError):  # of a model without blocks, as that backend says itself
                for inner in backend.layouts(replace(job, ranks_per_sample=-1)):
                    yield from _around(backend.name, inner)

    def open(self, job: Job) -> "ContextSession":
        """Join the process group, unless the script has done so, and form the groups.

        Raises:
            ConfigError: The ranks are no multiple of those that share a sequence; or there is no such backend
                for the weights, or it does not go with split sequences.

        Collective: the ranks' rendezvous, and the creation of the groups.
        """
        from tp_context._session import ContextSession, WholeWeights

        options = self.parse_options(job)
        ranks_of_a_sequence(options, job.environment.world_size)
        weights, inner = self._weights(job)
        session = WholeWeights(inner, options) if weights is None else weights.open(inner)
        return ContextSession(session, options)

    def _weights(self, job: Job) -> tuple[Backend[Any] | None, Job]:
        """Return the backend that holds the weights, ``None`` for ours, and the job for it.

        Raises:
            ConfigError: It is not installed, or does not go with ranks that share samples.
        """
        options = self.parse_options(job)
        inner = replace(job, ranks_per_sample=options.context)
        if options.weights == "whole":
            return None, inner
        others = [each.item for each in registry.backends() if each.item.shares_samples]
        backend = next((item for item in others if item.name == options.weights), None)
        if backend is None:
            msg = (
                f"the option weights={options.weights!r} of backend 'context' must be 'whole' or a backend "
                "with ranks that can share samples; of these are installed: "
                f"{', '.join(sorted(repr(item.name) for item in others)) or 'none'}"
            )
            raise ConfigError(msg)
        return backend, inner


def _around(weights: str, inner: Layout) -> Iterable[Layout]:
    """Yield a layout of the backend of the weights with its readers in groups that share a sequence.

    Weights that are sharded are so over the ranks of a group, too.
    """
    axis: Literal["data", "fsdp"] = "fsdp" if inner.axes.get("fsdp", 1) > 1 else "data"
    for context in divisors(inner.axes.get(axis, 1)):
        axes: dict[Axis, int] = {**inner.axes, axis: inner.axes[axis] // context, "context": context}
        options = {**inner.options, "context": {"context": context, "weights": weights}}
        yield replace(inner, axes=axes, options=options)


_TILES = 4
"""The memory of tiles of scores beside each other, in tiles: 3.3 on a simulated device, in float32."""
_TILES_WITH_DROPOUT = 6
"""The same with dropout, where it was 5.4."""


def _scores(footprint: Footprint, context: int, attention: str, device_type: str) -> tuple[str, int]:
    """Return what attention is computed by, in words, and the bytes of its scores in memory."""
    from tp_context._fused_kernels import Wanted, refusals
    from tp_context._score_blocks import ROWS

    call = footprint.attention
    if context == 1 or not call:
        return "", 0
    samples = math.ceil(footprint.part * context)
    row = int(call["row"]) * samples
    tile = ROWS * row
    if attention in {"ulysses", "ring"}:  # some of the heads, or of the keys
        tile //= context
    if call["dropout"]:
        # As one device draws it, of which each rank takes its part.
        drawn = row // 4 * int(call["queries"])
        highest = max(drawn + drawn // context, drawn // context + _TILES_WITH_DROPOUT * tile)
        words = f"attention by no fused kernel, for its dropout: all of its mask, scores of {ROWS} rows"
        return words, highest
    mask = getattr(torch, str(call["mask"])) if call["mask"] else None
    sizes = int(call["features"]), int(call["value_features"])
    found = refusals(Wanted(device_type, getattr(torch, str(call["dtype"])), *sizes, mask))
    able = next((name for name, reason in found.items() if not reason), None)
    if able is None:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in found.items()) or "it has none"
        return f"attention by no fused kernel ({reasons}), scores of {ROWS} rows", _TILES * tile
    words = f"attention by torch's {able} kernel"
    if mask is not None:
        words += f", masks of {ROWS} rows"
    return words, 0


def _sliced(footprint: Footprint, context: int, attention: str, scores: int) -> Footprint:
    """Return the footprint of a rank that has a slice of each of its group's samples."""
    samples = math.ceil(footprint.part * context)
    part = samples / context
    # Whole keys and values with their gradients; or those of two ranks at a time, or of some heads.
    attended = footprint.keys // max(footprint.attentions, 1)
    gathered = attended * samples * 2 if context > 1 else 0
    if attention in {"ulysses", "ring"}:
        gathered = 2 * gathered // context
    gathered += scores

    def sliced(nbytes: int, fixed: int = 0) -> int:
        return min(nbytes, fixed) + math.ceil(max(0, nbytes - fixed) * part)

    traces = footprint.with_batch_of(part)

    def exchanged(trace: Sequence[Sequence[Any]]) -> list[Sequence[Any]]:
        """Return a trace with what attention exchanges in the backward pass, which has most of it."""
        events = []
        for event in trace:
            events.append(event)
            if event[0] == "backward" and gathered:
                events.append(("value", -len(trace) - 1, gathered, ""))  # no other has this number
        return events

    casts, activations = footprint.casts, footprint.activations
    gradient = max(0, (activations or 0) - footprint.alone)  # the one that is being computed
    beside = max(0, footprint.with_gradients - footprint.gradients)
    return replace(
        footprint,
        activations=None if activations is None else sliced(activations, casts + gradient) + gathered,
        alone=sliced(footprint.alone, casts) + gathered,
        with_gradients=footprint.gradients + sliced(beside, casts) + gathered,
        batch=sliced(footprint.batch),
        kept={name: sliced(nbytes) for name, nbytes in footprint.kept.items()},
        passed={name: sliced(nbytes) for name, nbytes in footprint.passed.items()},
        timeline={
            name: [sliced(nbytes, casts) + gathered for nbytes in both]
            for name, both in footprint.timeline.items()
        },
        part=footprint.part * context / samples,
        trace=exchanged(traces.trace),
        lower_trace=exchanged(traces.lower_trace),
    )


def ranks_of_a_sequence(options: ContextOptions, size: int) -> int:
    """Return the number of ranks that share a sequence.

    Raises:
        ConfigError: All ranks are no multiple of it.
    """
    context = size if options.context == -1 else options.context
    if size % context:
        msg = (
            f"the option context={context} of backend 'context' shares each sequence among this many ranks, "
            f"and {size} ranks are not a multiple of it"
        )
        raise ConfigError(msg)
    return context
