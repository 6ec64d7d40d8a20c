"""The session of a rank that has slices of its group's sequences."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from itertools import count
from numbers import Real
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from tp_core import tree_map
from tp_core.data import CountedBatch, SampleRows, Share, StepOutput, read_weight, split_weight, step_identity
from tp_core.errors import ConfigError, DisagreementError, ModelError, PluginError, StepError
from tp_core.plugins import Job, Session
from tp_core.sessions import (
    ProcessGroupSession,
    SessionWrapper,
    all_gather_single,
    join_process_group,
    new_process_group,
)

from tp_context._check import SequenceRanks, SliceProof, prove, refuse
from tp_context._inputs import splitting
from tp_context._options import ContextOptions
from tp_context._slices import (
    BatchSequences,
    Cut,
    Cuts,
    Loss,
    as_before,
    dims_of,
    find_sequences,
    find_slice,
    form_of,
    map_sequences,
    take_slices,
    taken_by_size,
)


class WholeWeights(ProcessGroupSession):
    """One rank with a copy of the weights; DDP averages their gradients over all ranks.

    Args:
        job: The job, with the ranks that share a sequence.
        options: The options.
    """

    def __init__(self, job: Job, options: ContextOptions) -> None:
        leave = join_process_group(
            job.environment,
            device=job.devices[0],
            timeout_s=options.timeout_s,
            bind_device=options.bind_device,
        )
        super().__init__(job, leave=leave)
        self.options = options

    def prepare_model(self, model: nn.Module) -> nn.Module:
        """Move the model to the device and wrap it in DDP over all ranks.

        Raises:
            ModelError: ``model`` is not a module, or is wrapped already.
            DisagreementError: The ranks' parameters differ in name, shape or type.

        Collectives: an all-gather of the parameters' descriptions, a broadcast of the weights.
        """
        self.check_plain(model)
        self.check_same_parameters(model)
        return self.average_gradients(
            super().prepare_model(model),
            find_unused_parameters=self.options.find_unused_parameters,
            gradient_as_bucket_view=True,
            bucket_cap_mb=self.options.bucket_cap_mb,
        )


class ContextSession(SessionWrapper):
    """One rank of a job in which groups of ranks share each sequence.

    Consecutive data ranks of the session that holds the weights share the sequences. A step runs on this
    rank's slices. Its loss counts by its "weight", and comes back as the whole sequences' loss.
    Gradients are averaged over all ranks, so that each adds what its slices contribute.

    Args:
        inner: The session that holds the weights.
        options: The options.

    Raises:
        PluginError: The session does not say which ranks share samples.

    Collectives: the creation of a group of the ranks that run each step together.
    """

    def __init__(self, inner: Session, options: ContextOptions) -> None:
        super().__init__(inner)
        if not isinstance(inner, ProcessGroupSession):
            msg = (
                f"the backend {options.weights!r} opened a {type(inner).__name__}, and ranks that share "
                "samples have a tp_core.sessions.ProcessGroupSession"
            )
            raise PluginError(msg)
        self.options = options
        # Ranks that exchange something else in a step, such as parts of weights, must agree in a check.
        if inner.evaluates_together:
            together = None
        else:
            together = self._ranks_of_samples()
        self.ranks = SequenceRanks(
            inner.sample_group, inner.sample_rank, inner.sample_size, together, options.attention
        )
        self._splits = inner.sample_size > 1 and options.sequence != {}
        self._proofs: WeakKeyDictionary[nn.Module, dict[tuple[Any, ...], SliceProof]] = WeakKeyDictionary()
        # The dimensions of sequences in batches of which a model was proved, by the batches' form.
        self._dims: dict[tuple[tuple[str, int], ...], list[int | None]] = {}
        # The runs that a backward pass may follow, by the cuts of their sequences.
        self._runs: dict[tuple[Cut, ...], tuple[nn.Module, Cuts, SliceProof]] = {}
        self._unsynced = 0
        self._has_accumulated = False

    def _ranks_of_samples(self) -> dist.ProcessGroup | None:
        """Return the group of all ranks with this rank's samples; ``None`` for all ranks."""
        own = None
        data_ranks = self.gather_objects(self.data_rank, where="data ranks of a sequence")
        for data_rank in range(self.data_size):
            ranks = [rank for rank, other in enumerate(data_ranks) if other == data_rank]
            if 1 < len(ranks) < self.world_size:
                # Every rank creates every group, and is in one of them: of others it gets None.
                own = new_process_group(ranks) or own
        return own

    # -- preparing ----------------------------------------------------------------------------

    def compile_model(self, model: nn.Module) -> None:
        """Compile a model of whole sequences.

        Raises:
            ConfigError: Sequences are split: the compiler would look past the exchange in attention.
        """
        if self._splits:
            msg = "compile=True does not go with backend 'context' yet; leave it out"
            raise ConfigError(msg)
        super().compile_model(model)

    # -- the step -----------------------------------------------------------------------------

    def run(self, step: Callable[[nn.Module, Any], StepOutput], model: nn.Module, batch: Any) -> StepOutput:
        """Run the step on this rank's slices of the batch, and join the outputs of all slices.

        Before the first call with a step, the model is checked on a short piece of the batch.

        Raises:
            StepError: It is not clear what has the sequence; the step returned no "weight", or what cannot be
                joined.
            ModelError: The split model is not proved to compute what the whole one does.
            DisagreementError: The ranks of a sequence have different batches.

        Collectives: those of attention and of `ProcessGroupSession.run`; an all-gather of a few numbers
        before the step, and one after it.
        """
        return self.run_several(step, [model], batch)

    def run_several(
        self, step: Callable[..., StepOutput], models: Sequence[nn.Module], batch: Any
    ) -> StepOutput:
        """Run ``step(*models, batch)`` as :meth:`run` does with one model.

        Raises:
            StepError: As in :meth:`run`; or there are several models, and sequences are split.

        Collectives: those of :meth:`run`.
        """
        if not self._splits:
            return self.inner.run_several(step, models, batch)
        if len(models) > 1:
            msg = (
                "a step of several models does not go with backend 'context' yet; put them into one "
                "(torch.nn.ModuleDict)"
            )
            raise StepError(msg)
        plain = self.unwrap(models[0])
        form = form_of(batch)
        if form in self._dims:
            sequences = as_before(batch, self._dims[form])
        else:
            decodes = bool(getattr(getattr(plain, "config", None), "is_encoder_decoder", False))
            sequences = find_sequences(batch, self.options.sequence, decodes=decodes)
        self._check_same_batch(batch, sequences)
        proof = self._proof(step, plain, batch, sequences)
        self._dims.setdefault(form, dims_of(batch, sequences))
        cuts = self.ranks.cuts(plain, batch, sequences, others=proof.others)
        proof.mark(cuts)
        sliced = take_slices(batch, sequences, cuts)
        with splitting(plain, cuts, proof.scheme):
            if self.inner.runs_step_in_parts:
                # Of a step that was not compared, rows of whole sequences are still right.
                key = step_identity(step, unwraps=True)
                is_compared = any(known[0] == key for known in self._proofs[plain])
                run = partial(self._run_part, step, cuts, is_compared)
                return _as_returned(self.inner.run(run, models[0], sliced))
            output = self.inner.run(step, models[0], sliced)
        if torch.is_grad_enabled():
            self._runs[tuple(cuts)] = plain, cuts, proof
        joined: StepOutput = self._joined(output, cuts)
        return joined

    def _proof(
        self, step: Callable[..., StepOutput], model: nn.Module, batch: Any, sequences: BatchSequences
    ) -> SliceProof:
        """Return what is proved of the model, after a check where it is not known yet.

        Raises:
            ModelError: It is not proved.
        """
        names: tuple[str, ...] = ()
        if isinstance(batch, Mapping):
            names = tuple(sorted(map(str, batch)))
        # A tensor that has its sequence elsewhere, or one of its own, is not the one that was compared.
        form = names, tuple(dims_of(batch, sequences)), len(sequences.lengths)
        key: tuple[Any, ...] = step_identity(step), model.training, torch.is_grad_enabled(), form
        proofs = self._proofs.setdefault(model, {})
        if self.inner.cuts_models:  # so training is compared for evaluation, too
            key = step_identity(step, unwraps=True), form
            of_same_batches = next((known for known in proofs if known[1] == form), None)
            if proofs and of_same_batches is None:
                first = next(iter(proofs))[1]
                msg = (
                    "backend 'context' compares slices with the whole model before the first step, and with "
                    f"weights={self.options.weights!r} no rank has it later: give batches like the first, "
                    f"with {_described(first)}, got {_described(form)}"
                )
                raise StepError(msg)
            if of_same_batches is not None:
                key = of_same_batches
        proof = proofs.get(key)
        if proof is None:
            self._check_batch(step, model, batch)
            grads = torch.is_grad_enabled() or self.inner.cuts_models
            with self._gradients_of_a_check(model) as compares, torch.set_grad_enabled(grads):
                proved = prove(
                    self._call(step),
                    model,
                    batch,
                    sequences,
                    ranks=self.ranks,
                    tokens=self.options.check_tokens,
                    join=self._joined,
                    compares_gradients=compares,
                )
            # In evaluation a rank of another group may have no batch, and would not be there to hear of it.
            hears = torch.is_grad_enabled() and model.training
            if hears:
                outcomes = self.gather_objects(proved, where="proofs of a model")
            else:
                outcomes = [proved]
            for other in outcomes:
                if isinstance(other, str):
                    by_size = []
                    if self.options.sequence is None:
                        by_size = taken_by_size(batch, sequences)
                    raise refuse(other, by_size)
            proof = proofs[key] = cast("SliceProof", proved)  # it is among those looked at above
        return proof

    def _run_part(
        self, step: Callable[..., StepOutput], cuts: Cuts, is_compared: bool, model: nn.Module, part: Any
    ) -> StepOutput:
        """Run a step for some of the samples, and return the output of their whole sequences.

        A loss that is a mean over the labels of a model says so, for the mean over all samples.

        Raises:
            StepError: It returns numbers, and was not compared with the whole model.

        Collectives: those of the step, and of :meth:`_joined`.
        """
        cuts.loss = Loss()
        output = step(model, part)
        if isinstance(output, Mapping):
            values = output
        else:
            values = {"loss": output}
        numbers = [n for n, v in values.items() if n != "weight" and (_is_number(v) or isinstance(v, tuple))]
        if numbers and not is_compared:
            msg = (
                f"the step returns {', '.join(map(repr, numbers))}, and is another one than the first, which "
                "backend 'context' has compared with the whole model; with "
                f"weights={self.options.weights!r} no rank has it later: train and evaluate by one step; "
                "predict() takes any"
            )
            raise StepError(msg)
        if cuts.loss.units is None or "weight" in values or self.job.loss == "sum":
            joined: StepOutput = self._joined(output, cuts)
            return joined
        kind = _UNWEIGHED if isinstance(output, Mapping) else _BARE
        return {**self._joined({**values, "weight": cuts.loss.units}, cuts), kind: None}

    def _check_batch(self, step: Callable[..., StepOutput], model: nn.Module, batch: Any) -> None:
        """Let a batch that checks the step before training do so with whole sequences.

        Raises:
            ModelError: It finds something, on any rank.

        Collective: an all-gather of the problems.
        """
        if not isinstance(batch, CountedBatch) or not model.training or not torch.is_grad_enabled():
            return
        problem = ""
        try:
            batch.check(self._call(step), model)
        except ModelError as error:
            problem = str(error)
        problem = next(filter(None, self.gather_objects(problem, where="problems of a batch")), "")
        if problem:
            raise ModelError(problem)

    def _call(self, step: Callable[..., StepOutput]) -> Callable[..., StepOutput]:
        """Return the step as a check calls it: past DDP, but with shards of weights gathered."""
        if self.inner.evaluates_together:
            return partial(self.inner.run, step)
        return step

    @contextmanager
    def _gradients_of_a_check(self, model: Any) -> Iterator[bool]:
        """Keep the gradients of shards out of a check; yields whether it may compare its own.

        Not where some are accumulated, and not reduced yet: they would be reduced with those of the check.
        """
        sharded = hasattr(model, "set_requires_gradient_sync")  # an FSDPModule
        if not sharded:
            yield True
            return
        kept = [(p, p.grad) for p in model.parameters()]
        try:
            for parameter, _ in kept:
                parameter.grad = None
            model.set_requires_gradient_sync(True)
            yield not self._has_accumulated
        finally:
            model.set_requires_gradient_sync(not self._unsynced)
            for parameter, grad in kept:
                parameter.grad = grad

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return a context in which gradients accumulate locally and are not reduced over ranks."""
        return self._no_sync(model)

    @contextmanager
    def _no_sync(self, model: nn.Module) -> Iterator[None]:
        self._unsynced += 1
        try:
            with self.inner.no_sync(model):
                yield
        finally:
            self._unsynced -= 1

    def _check_same_batch(self, batch: Any, sequences: BatchSequences) -> None:
        """Make sure that the ranks of a sequence have the same one.

        Raises:
            DisagreementError: They have not.

        Collectives: an all-gather of a few numbers.
        """
        sums = [float(n) for n in sequences.lengths]

        def note(tensor: Tensor, _: int) -> Tensor:
            exact = tensor.detach().double()
            sums.append(float(exact.nan_to_num(0.0, 0.0, 0.0).sum()))
            return tensor

        map_sequences(batch, sequences, note)
        mine = torch.zeros(32, dtype=torch.float64)
        mine[: len(sums[:32])] = torch.tensor(sums[:32], dtype=torch.float64)
        rows = self._gather_numbers(mine)
        other = next((r for r, row in enumerate(rows) if not torch.equal(row, rows[0])), None)
        if other is not None:
            first = [int(x) for x in rows[0][: len(sequences.lengths)]]
            its = [int(x) for x in rows[other][: len(sequences.lengths)]]
            msg = (
                f"the ranks that share a sequence have different batches: sequences of {first} tokens on the "
                f"first, of {its} on number {other}; give them the same samples: each data rank "
                "(trainer.session.data_rank) reads its own, and ranks of one sequence have the same data rank"
            )
            raise DisagreementError(msg)

    def _gather_numbers(self, mine: Tensor) -> Tensor:
        """Return each rank's numbers: (ranks, numbers), on the CPU."""
        # Ranks hold: varying -> replicated.
        sent = mine.to(self.device)
        rows = sent.new_empty(self.ranks.size, len(sent))
        all_gather_single(rows.view(-1), sent, group=self.ranks.group)
        return rows.cpu()

    # -- the outputs of all slices ------------------------------------------------------------

    def _joined(self, output: Any, cuts: Cuts) -> Any:
        """Return the output that the step would have returned for whole sequences.

        Raises:
            StepError: A value cannot be joined, or has no weight.

        Collectives: an all-gather of the numbers; one for each tensor with a row for each token.
        """
        values: Mapping[str, Any] = output if isinstance(output, Mapping) else {"loss": output}
        numbers = {n: v for n, v in values.items() if n != "weight" and _is_number(v)}
        pairs = {n: split_weight(n, v) for n, v in values.items() if isinstance(v, tuple)}
        weight = self._weight(values, numbers, cuts)
        cuts.loss.counts = weight > 0
        sent = [_number(v) for v in numbers.values()]
        sent.append(weight)
        for mean, own_weight in pairs.values():
            sent.append(_number(mean))
            sent.append(_number(own_weight or 0.0))
        cuts.announce(("numbers", sorted(values)))
        table = self._gather_numbers(torch.tensor(sent, dtype=torch.float64))
        weights = table[:, len(numbers)]
        joined: dict[str, Any] = {}
        for i, (name, value) in enumerate(numbers.items()):
            is_total = name == "loss" and self.job.loss == "sum"
            if is_total:
                whole = float(table[:, i].sum())
            else:
                whole = _mean(table[:, i], weights)
            if not isinstance(value, Tensor):
                joined[name] = whole
            elif name == "loss":
                scale = float(self.ranks.size)
                total = float(weights.sum())
                if not is_total and total:
                    scale *= weight / total
                joined[name] = _SequenceLoss.apply(value, whole, scale)  # type: ignore[no-untyped-call]  # torch's
            else:
                joined[name] = value.new_tensor(whole, dtype=_floating(value))
        for i, name in enumerate(pairs):
            at = len(numbers) + 1 + 2 * i
            joined[name] = _mean(table[:, at], table[:, at + 1]), float(table[:, at + 1].sum())
        for name, value in values.items():
            if name == "weight":
                joined[name] = float(weights.sum())
            elif name not in joined:
                joined[name] = self._rows(name, value, cuts)
        if not isinstance(output, Mapping):
            return joined["loss"]
        return {name: joined[name] for name in values}

    def _weight(self, values: Mapping[str, Any], numbers: Mapping[str, Any], cuts: Cuts) -> float:
        if "weight" in values:
            return read_weight(values["weight"])
        if self.job.loss == "sum" and set(numbers) <= {"loss"}:
            return 1.0
        if cuts.loss.units is not None:
            return cuts.loss.units
        if not numbers:
            return 1.0
        msg = (
            "the step returned no 'weight', and on backend 'context' it sees a part of each sequence: return "
            "{'loss': loss, 'weight': n} with the number of tokens of its batch that the loss is a mean "
            "over, such as (batch['labels'] != -100).sum()"
        )
        raise StepError(msg)

    def _rows(self, name: str, value: Any, cuts: Cuts, number: int = 0) -> Any:
        """Return a value with rows, of whole sequences: the one of this number under its name.

        Raises:
            StepError: It is no tensor, or has no dimension of the slices and differs between ranks.
        """
        if value is None:
            return None
        if isinstance(value, SampleRows):
            numbers = count()

            def joined(leaf: Any) -> Any:
                return self._rows(name, leaf, cuts, next(numbers))

            return SampleRows(tuple([tree_map(joined, piece) for piece in value.pieces]))
        if not isinstance(value, Tensor):
            msg = (
                f"the step's {name!r} is of type {type(value).__name__}, and of a part of each sequence: on "
                "backend 'context' return numbers and tensors"
            )
            raise StepError(msg)
        place = find_slice(value, cuts, cuts.dims_of_outputs, (name, number))
        if place is not None:
            dim, cut = place
            return cut.gather(value.detach(), dim)
        cuts.announce(("rows", name))
        sums = self._gather_numbers(value.detach().double().sum()[None].cpu())
        if any(not torch.allclose(sums[0], other, equal_nan=True) for other in sums):
            msg = (
                f"the step's {name!r} has shape {tuple(value.shape)}, with no dimension of the slice's "
                "tokens, and differs between the ranks of a sequence: return a row for each token, or one "
                "value of the whole sequence, with tp_context.gather()"
            )
            raise StepError(msg)
        return value

    def backward(self, loss: Tensor, share: Share | None = None, **graph: bool) -> None:
        """Add the gradients of the loss over the whole global batch, in which sequences are whole.

        Collective: those of attention, and DDP's bucketed all-reduces, unless inside :meth:`no_sync`.
        """
        runs = list(self._runs.values())
        with ExitStack() as stack:
            if runs:  # layers that are recomputed see slices again, of whichever run
                model, _, proof = runs[-1]
                own = {c: c for _, each, _ in runs for c in each}
                cuts = Cuts(own.values(), self.options.attention, of_runs=True)
                cuts.loss.counts = any(each.loss.counts for _, each, _ in runs)
                proof.mark(cuts)
                stack.enter_context(splitting(model, cuts, proof.scheme))
            self.inner.backward(loss, share, **graph)
        if not any(graph.values()):
            self._runs.clear()
        self._has_accumulated = self._unsynced > 0

    def close(self) -> None:
        """Leave the process group, if this session has joined it."""
        self._runs.clear()
        self.inner.close()


class _SequenceLoss(torch.autograd.Function):
    """The loss of whole sequences, with the gradient of this rank's part.

    Forward and backward exchange nothing: the value is known, and each rank goes back from its own loss.
    """

    @staticmethod
    def forward(ctx: Any, loss: Tensor, value: float, scale: float) -> Tensor:
        ctx.scale = scale
        return torch.full_like(loss, value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad * ctx.scale, None, None


# Keys of a part's output to which tp-context has added the weight.
_UNWEIGHED, _BARE = "tp_context.unweighed", "tp_context.bare"


def _as_returned(output: StepOutput) -> StepOutput:
    """Return an output with what the user's step returns alone."""
    if not isinstance(output, Mapping) or not {_UNWEIGHED, _BARE} & output.keys():
        return output
    if _BARE in output:
        loss: Tensor = output["loss"]
        return loss
    return {name: value for name, value in output.items() if name not in {"weight", _UNWEIGHED}}


def _described(form: tuple[tuple[str, ...], tuple[int | None, ...], int]) -> str:
    """Return the form of a batch in words: names, the dimension of each tensor's sequence, lengths."""
    names, dims, lengths = form
    return (
        f"the names {list(names)}, sequences in the dimensions {list(dims)} and {lengths} length(s) of them"
    )


def _number(value: Any) -> float:
    return float(value.detach() if isinstance(value, Tensor) else value)


def _is_number(value: Any) -> bool:
    return (isinstance(value, Tensor) and value.numel() == 1) or isinstance(value, Real)


def _floating(value: Tensor) -> torch.dtype:
    if value.is_floating_point():
        return value.dtype
    return torch.get_default_dtype()


def _mean(values: Tensor, weights: Tensor) -> float:
    """Return the weighted mean; a value of weight 0 does not count, and may be NaN."""
    total = float(weights.sum())
    if not total:
        return float(values[0])  # a mean over nothing, as on one device
    return float(torch.where(weights > 0, values * (weights / total), 0.0).sum())
