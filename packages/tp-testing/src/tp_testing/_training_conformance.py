"""The conformance tests of training on a backend, for its author to subclass."""

import os
import signal
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from tp_core.compare import Bound, assert_same
from tp_core.data import StepOutput
from tp_core.discovery import PluginRegistry
from tp_core.jobs import CompileOptions
from tp_core.ranks import rank_outcomes, run_ranks
from tp_trainer import Checkpoints, GradientRules, Interrupted, SchedulerOptions, Trainer

from tp_testing._kit import ConformanceKit

# -- Ways to train that must equal a plain loop on one device -------------------------------------


@dataclass(frozen=True, slots=True)
class TrainingCase:
    """A case of training that must equal a plain loop.

    Attributes:
        fits: The number of calls of ``fit`` in one session that share the epochs.
        gamma: The factor of a scheduler on the learning rate after each step, or ``None``.
        bad_target: A bad target for one sample, or ``None``; its batch must be skipped.
        dtype: The type of the model and the data before they are prepared.
    """

    trainer: Mapping[str, Any] = field(default_factory=dict)
    gradients: GradientRules = field(default_factory=GradientRules)
    fits: int = 1
    gamma: float | None = None
    bad_target: float | None = None
    dtype: torch.dtype = torch.float64


CASES = {
    "plain": TrainingCase(),
    "two fits": TrainingCase(fits=2),
    "schedule": TrainingCase(gamma=0.7),
    "accumulate": TrainingCase({"accumulate": 3}),
    "clip_norm": TrainingCase(gradients=GradientRules(clip_norm=0.05)),
    "clip_value": TrainingCase(gradients=GradientRules(clip_value=0.005)),
    "accumulate and clip": TrainingCase({"accumulate": 2}, GradientRules(clip_norm=0.05, clip_value=0.02)),
    "nonfinite skip": TrainingCase(gradients=GradientRules(nonfinite="skip"), bad_target=float("nan")),
    # aot_eager tests the place of the compiler; inductor would take many seconds.
    "compile": TrainingCase({"compile": CompileOptions(backend="aot_eager")}),
    "bf16-mixed": TrainingCase({"precision": "bf16-mixed"}, dtype=torch.float32),
    "fp16-mixed": TrainingCase({"precision": "fp16-mixed"}, bad_target=1e15, dtype=torch.float32),
    "bf16-true": TrainingCase({"precision": "bf16-true"}, dtype=torch.float32),
}


# -- The runs, and their reference ----------------------------------------------------------------


SAMPLES, BATCH_SIZE, EPOCHS, RATE = 22, 4, 2, 0.1
BAD = 5  # the bad sample of the cases that have one

State = dict[str, Tensor]


class StoppedError(Exception):
    """Raised to end a run in its middle."""


@dataclass(frozen=True, slots=True)
class TrainingOutcome:
    """The result of a run: the whole model's state, and the records of its epochs as plain values."""

    state: State
    epochs: list[dict[str, Any]]


def samples(count: int = SAMPLES, *, dtype: torch.dtype = torch.float64) -> TensorDataset:
    """Return the data: the same on every call, and small enough for the first loss scale of fp16."""
    generator = torch.Generator().manual_seed(11)
    x = torch.randn(count, 6, dtype=torch.float64, generator=generator) / 4
    y = torch.randn(count, 3, dtype=torch.float64, generator=generator) / 4
    return TensorDataset(x.to(dtype), y.to(dtype))


def mean_error(model: nn.Module, batch: Any) -> StepOutput:
    """Return the mean error: a step without randomness."""
    return nn.functional.mse_loss(model(batch[0]), batch[1])


@dataclass(slots=True)
class NoisyStep:
    """A step with random noise, which calls a function at its n-th call in training."""

    at: int = 0
    then: Callable[[], None] = lambda: None
    _calls: int = 0
    _lock: Any = field(default_factory=threading.Lock)

    def __call__(self, model: nn.Module, batch: Any) -> StepOutput:
        if model.training:
            with self._lock:  # a backend may run it on several devices at once
                self._calls += 1
                is_now = self._calls == self.at
            if is_now:
                self.then()
        noise = 0.01 * torch.randn((), dtype=torch.float64)
        return {"loss": nn.functional.mse_loss(model(batch[0]), batch[1]) + noise, "noise": noise}


def make_trainer(kit: ConformanceKit, **arguments: Any) -> Trainer:
    """Return a trainer on the kit's backend, installed or not."""
    plugins, name = PluginRegistry(), kit.backend.name
    installed = {c.item.name: type(c.item) for c in plugins.backends()}
    if installed.setdefault(name, kit.backend) is not kit.backend:
        msg = f"the backend {name!r} that is installed is not the one under test: {installed[name]}"
        raise TypeError(msg)
    if all(c.item.name != name for c in plugins.backends()):
        plugins.register(kit.backend())
    return Trainer(
        backend=name,
        devices=list(kit.devices) * kit.processes,
        seed=5,
        progress=False,
        plugins=plugins,
        options=kit.job_options(),
        **arguments,
    )


def fit(
    trainer: Trainer,
    model: nn.Module,
    *,
    step: Callable[[nn.Module, Any], StepOutput] = mean_error,
    data: TensorDataset | None = None,
    shuffle: bool = False,
    fits: int = 1,
    gamma: float | None = None,
    **arguments: Any,
) -> TrainingOutcome:
    """Train as in every test here; for ``fits`` and ``gamma`` see `TrainingCase`."""
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    if gamma is not None:
        arguments["scheduler"] = SchedulerOptions(_decaying(optimizer, gamma), every="step")
    data = samples() if data is None else data
    loader = DataLoader(data, batch_size=BATCH_SIZE, shuffle=shuffle)
    arguments = {"epochs": EPOCHS // fits} | arguments
    records = []
    for _ in range(fits):
        history = trainer.fit(model, optimizer, loader, step=step, **arguments)
        records += [{"samples": r.samples, "train": dict(r.train), "val": dict(r.val)} for r in history]
    state = {n: t.detach().cpu().clone() for n, t in trainer.session.model_state(model).items()}
    return TrainingOutcome(state, records)


def _decaying(optimizer: torch.optim.Optimizer, gamma: float) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=gamma)


def by_hand(kit: ConformanceKit, case: TrainingCase) -> TrainingOutcome:
    """Train the reference on one device with a loop by hand, in the precision of the data."""
    model = kit.make_reference().to(case.dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    scheduler = _decaying(optimizer, case.gamma or 1.0)
    few = samples(5, dtype=case.dtype).tensors
    records = []
    for _ in range(EPOCHS):
        count, total = 0, 0.0
        for x, y in _steps(case):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            _clip(model, case.gradients)
            optimizer.step()
            scheduler.step()
            count, total = count + len(x), total + len(x) * loss.item()
        with torch.no_grad():
            val = nn.functional.mse_loss(model(few[0]), few[1]).item()
        records.append({"samples": count, "train": {"loss": total / count}, "val": {"loss": val}})
    return TrainingOutcome(dict(model.state_dict()), records)


def _clip(model: nn.Module, gradients: GradientRules) -> None:
    if gradients.clip_value is not None:
        nn.utils.clip_grad_value_(model.parameters(), gradients.clip_value)
    if gradients.clip_norm is not None:
        nn.utils.clip_grad_norm_(model.parameters(), gradients.clip_norm)


def _steps(case: TrainingCase) -> list[tuple[Tensor, Tensor]]:
    """Return the data of each optimizer step of an epoch, as one batch."""
    x, y = samples(dtype=case.dtype).tensors
    size = BATCH_SIZE * case.trainer.get("accumulate", 1)
    steps = [(x[i : i + size], y[i : i + size]) for i in range(0, SAMPLES, size)]
    if case.bad_target is not None:
        del steps[BAD // size]
    return steps


# -- On every rank --------------------------------------------------------------------------------


def trained_in_all_cases(kit: ConformanceKit) -> dict[str, TrainingOutcome]:
    return {name: _trained(kit, case) for name, case in CASES.items()}


def _trained(kit: ConformanceKit, case: TrainingCase) -> TrainingOutcome:
    data = samples(dtype=case.dtype)
    if case.bad_target is not None:
        data.tensors[1][BAD] = case.bad_target
    # An odd number of samples: some ranks have none of the last batch.
    few = DataLoader(samples(5, dtype=case.dtype), batch_size=BATCH_SIZE)
    model = kit.make_model().to(case.dtype)
    with make_trainer(kit, **case.trainer) as trainer:
        return fit(
            trainer,
            model,
            data=data,
            validation=few,
            fits=case.fits,
            gamma=case.gamma,
            gradients=case.gradients,
        )


def _noisy(kit: ConformanceKit, folder: str | None, step: NoisyStep, **arguments: Any) -> TrainingOutcome:
    with make_trainer(kit, accumulate=2) as trainer:
        model = nn.Sequential(nn.Dropout(0.2), kit.make_model())
        if folder is not None:
            arguments |= {"checkpoint": Checkpoints(folder, every_steps=1, background=True)}
        return fit(trainer, model, step=step, shuffle=True, **arguments)


def _stop() -> None:
    raise StoppedError


def resumed(
    kit: ConformanceKit, folder: str, stops: list[int]
) -> tuple[TrainingOutcome, list[TrainingOutcome]]:
    """Return an uninterrupted run, and runs that were stopped at batches and resumed."""
    outcomes = []
    for at in stops:
        place = str(Path(folder, str(at)))
        try:
            _noisy(kit, place, NoisyStep(at, _stop))
        except StoppedError:
            outcomes.append(_noisy(kit, place, NoisyStep(), resume="auto"))
    return _noisy(kit, None, NoisyStep()), outcomes


def resumed_after(kit: ConformanceKit, folder: str) -> tuple[TrainingOutcome, TrainingOutcome]:
    """Return an uninterrupted run, and one that resumes from the checkpoints of another run."""
    return _noisy(kit, None, NoisyStep()), _noisy(kit, folder, NoisyStep(), resume="auto")


def stopped(kit: ConformanceKit, folder: str, at: int) -> None:
    """Train without noise up to a batch, and leave the checkpoints."""
    count = 0

    def step(model: nn.Module, batch: Any) -> StepOutput:
        nonlocal count
        count += 1
        if count > at:
            _stop()
        return mean_error(model, batch)

    checkpoint = Checkpoints(folder, every_steps=1)
    with make_trainer(kit) as trainer:
        try:
            fit(trainer, kit.make_model(), step=step, checkpoint=checkpoint)
        except StoppedError:
            return


def interrupted(kit: ConformanceKit, folder: str) -> tuple[str, str, TrainingOutcome, TrainingOutcome]:
    """Send SIGTERM to the last rank, resume; return the signal, the checkpoint, both outcomes."""
    expected = _noisy(kit, None, NoisyStep())
    try:
        _noisy(kit, folder, NoisyStep(5, partial(_signal_last, kit, signal.SIGTERM)))
    except Interrupted as end:
        resumed = _noisy(kit, folder, NoisyStep(), resume="auto")
        return end.signal.name, Path(end.checkpoint).name, expected, resumed
    msg = "the signal did not end the run"
    raise RuntimeError(msg)


def killed(kit: ConformanceKit, folder: str) -> None:
    """Kill the last rank in its fifth batch; the others must end soon after."""
    _noisy(kit, folder, NoisyStep(5, partial(_signal_last, kit, signal.SIGKILL)))


def _signal_last(kit: ConformanceKit, signum: signal.Signals) -> None:
    if int(os.environ.get("RANK", "0")) == kit.processes - 1:
        os.kill(os.getpid(), signum)


# -- Losses that are means over other units than samples ------------------------------------------


WEIGHTED_CASES = {
    "each batch": TrainingCase(),
    "accumulate 2": TrainingCase({"accumulate": 2}),
    "accumulate 4": TrainingCase({"accumulate": 4}),
    "accumulate and clip": TrainingCase({"accumulate": 2}, GradientRules(clip_norm=0.05, clip_value=0.02)),
    "nonfinite skip": TrainingCase(gradients=GradientRules(nonfinite="skip")),
    "sum": TrainingCase({"loss": "sum"}, GradientRules(clip_norm=0.05)),
    "sum and accumulate": TrainingCase({"loss": "sum", "accumulate": 2}, GradientRules(clip_norm=0.05)),
}


def masked_data(samples: int = 22) -> TensorDataset:
    """Return inputs, targets, and a mask of the targets' elements that count.

    In the second batch nothing counts in the second half, in the third in the first half, and in the fourth
    nothing at all.
    """
    generator = torch.Generator().manual_seed(13)
    x, y = (torch.randn(samples, n, dtype=torch.float64, generator=generator) for n in (6, 3))
    counts = torch.rand(samples, 3, dtype=torch.float64, generator=generator) < 0.5
    counts[::4, 0] = True
    for nothing in (slice(6, 8), slice(8, 10), slice(12, 16), slice(21, 22)):
        counts[nothing] = False
    return TensorDataset(x, y, counts)


def masked_error(model: nn.Module, batch: Any) -> StepOutput:
    """Return a mean over the elements that count; if none does, it and its gradients are NaN."""
    x, y, counts = batch
    errors = (model(x) - y).square()
    counted = counts.sum()
    return {
        "loss": (errors * counts).sum() / counted,
        "weight": counted,
        "largest": y.max(),
        "error": (errors.detach().mean(), len(x)),
    }


def total_error(model: nn.Module, batch: Any) -> StepOutput:
    """Return the same loss as a sum, with its weight as a plain number."""
    x, y, counts = batch
    errors = (model(x) - y).square()
    return {"loss": (errors * counts).sum(), "weight": int(counts.sum())}


def weighted_by_hand(kit: ConformanceKit, case: TrainingCase) -> TrainingOutcome:
    """Train the reference on one device, with the masked_data of each optimizer step as one batch."""
    model = kit.make_reference()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    is_sum = case.trainer.get("loss") == "sum"
    size = BATCH_SIZE * case.trainer.get("accumulate", 1)
    tensors = masked_data().tensors
    records = []
    for _ in range(EPOCHS):
        sums = torch.zeros(4, dtype=torch.float64)  # of errors that count, of all; of both numbers
        for first in range(0, len(tensors[0]), size):
            x, y, counts = (t[first : first + size] for t in tensors)
            optimizer.zero_grad()
            errors = (model(x) - y).square()
            total = errors[counts].sum()
            sums += _sums(errors, counts)
            if not counts.any():
                continue
            loss = total if is_sum else total / counts.sum()
            loss.backward()
            _clip(model, case.gradients)
            optimizer.step()
        with torch.no_grad():
            x, y, counts = masked_data(9).tensors
            val = _sums((model(x) - y).square(), counts)
        records.append(
            {"samples": len(tensors[0]), "train": _means(sums, is_sum), "val": _means(val, is_sum)}
        )
    return TrainingOutcome(dict(model.state_dict()), records)


def _sums(errors: Tensor, counts: Tensor) -> Tensor:
    errors = errors.detach()
    return torch.stack([errors[counts].sum(), counts.sum(), errors.sum(), torch.tensor(errors.numel())])


def _means(sums: Tensor, is_sum: bool) -> dict[str, float]:
    counted, units, total, elements = sums.tolist()
    if is_sum:
        return {"loss": counted / units}
    return {"loss": counted / units, "error": total / elements}


# -- On every rank --------------------------------------------------------------------------------


def trained_by_weights(kit: ConformanceKit) -> dict[str, TrainingOutcome]:
    outcomes = {}
    for name, case in WEIGHTED_CASES.items():
        if case.trainer.get("loss") == "sum":
            step = total_error
        else:
            step = masked_error
        with make_trainer(kit, **case.trainer) as trainer:
            outcomes[name] = fit(
                trainer,
                kit.make_model(),
                step=step,
                data=masked_data(),
                validation=DataLoader(masked_data(9), batch_size=BATCH_SIZE),
                gradients=case.gradients,
            )
    return outcomes


def resumed_by_weights(
    kit: ConformanceKit, folder: str, stops: list[int]
) -> tuple[TrainingOutcome, list[TrainingOutcome]]:
    """Return an uninterrupted run, and runs that were stopped at batches and resumed."""

    def train(place: str | None, stop: int, **arguments: Any) -> TrainingOutcome:
        begun = 0

        def step(model: nn.Module, batch: Any) -> StepOutput:
            nonlocal begun
            begun += batch[0] is not None and model.training
            if stop and begun > stop:
                raise StoppedError
            return masked_error(model, batch)

        if place is not None:
            arguments["checkpoint"] = Checkpoints(place, every_steps=1)
        with make_trainer(kit, accumulate=2) as trainer:
            return fit(trainer, kit.make_model(), step=step, data=masked_data(), shuffle=True, **arguments)

    outcomes = []
    for stop in stops:
        place = str(Path(folder, str(stop)))
        try:
            train(place, stop)
        except StoppedError:
            outcomes.append(train(place, 0, resume="auto"))
    return train(None, 0), outcomes


def trained_in_own_loop(kit: ConformanceKit) -> tuple[State, Tensor]:
    """Train and evaluate in a custom loop; return the state, and the scores of all samples."""

    def scores(model: nn.Module, batch: Any) -> StepOutput:
        return {"loss": torch.zeros(()), "scores": model(batch[0])}

    with make_trainer(kit) as trainer:
        plain = kit.make_model()
        optimizer = torch.optim.SGD(plain.parameters(), lr=RATE)
        model, optimizer, loader = trainer.prepare(plain, optimizer, DataLoader(masked_data(), BATCH_SIZE))
        for batch in loader:
            optimizer.zero_grad()
            trainer.backward(trainer.run(masked_error, model, batch))
            optimizer.step()
        rows = []
        with torch.no_grad():
            for batch in trainer.prepare(DataLoader(masked_data(9), BATCH_SIZE), training=False):
                rows.append(trainer.gather_for_metrics(trainer.run(scores, model, batch))["scores"].cpu())
        state = {n: t.detach().cpu().clone() for n, t in trainer.session.model_state(model).items()}
        return state, torch.cat(rows)


# -- The tests -----------------------------------------------------------------------------------


EXACT = [name for name, case in CASES.items() if case.dtype == torch.float64]
ROUGH = [name for name in CASES if name not in EXACT]
SAME = Bound.of([torch.float64], depth="training")
STOPS = [1, 4, 7, 11]  # batches; every second one is in the middle of an accumulation of two
DEADLINE_S = 600.0  # long, for a busy machine; then a hanging rank is ended


class TrainingConformance(ConformanceKit):
    """The conformance tests of training on a backend. A subclass in a test module names the backend.

    Accumulation, clipping, precision, compilation, uneven batches, bad samples and weighted losses must give
    the same weights as a plain loop on one device. A run that an error or a signal has stopped must
    resume to equal an uninterrupted one, bit for bit. Its checkpoint must resume on one device. If a rank is
    killed, the others must not hang.

    Example:
        >>> class TestMine(TrainingConformance):
        ...     backend = MyBackend
    """

    # torch's compiler suppresses this warning itself, but not if several threads compile at once.
    pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

    _trained: ClassVar[list[dict[str, TrainingOutcome]]]
    _weighed: ClassVar[list[dict[str, TrainingOutcome]]]

    def trained(self) -> list[dict[str, TrainingOutcome]]:
        """Return each rank's outcomes of all cases; the processes are started once."""
        kit = type(self)
        if "_trained" not in kit.__dict__:
            kit._trained = self.everywhere(trained_in_all_cases)
        return kit._trained

    @pytest.mark.parametrize("way", EXACT)
    def test_it_leads_where_one_device_leads(self, way: str) -> None:
        expected = by_hand(self, CASES[way])
        for outcomes in self.trained():
            outcome = outcomes[way]
            assert_same(outcome.state, expected.state, depth="training")
            for record, wanted in zip(outcome.epochs, expected.epochs, strict=True):
                assert record["samples"] == wanted["samples"], "a sample was dropped or counted twice"
                assert record["train"] == pytest.approx(wanted["train"], rel=SAME.rtol)
                assert record["val"] == pytest.approx(wanted["val"], rel=SAME.rtol)

    @pytest.mark.parametrize("way", ROUGH)
    def test_lower_precision_leads_close_to_it(self, way: str) -> None:
        expected = by_hand(self, CASES[way])
        if way == "bf16-true":
            dtype = torch.bfloat16
        else:
            dtype = torch.float32
        for outcomes in self.trained():
            state = outcomes[way].state
            assert {tensor.dtype for tensor in state.values() if tensor.is_floating_point()} == {dtype}
            same_type = {n: t.to(expected.state[n].dtype) for n, t in state.items()}
            assert_same(same_type, expected.state, dtypes=[torch.bfloat16], depth="training")
            # All ranks must skip the same steps, and so have the same weights.
            _assert_equal(state, self.trained()[0][way].state)

    def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(self, tmp_path: Path) -> None:
        for expected, outcomes in self.everywhere(resumed, str(tmp_path), STOPS):
            assert len(outcomes) == len(STOPS), "a run was not stopped"
            for outcome in outcomes:
                _assert_same_run(outcome, expected)

    def test_a_checkpoint_goes_on_on_one_device(self, tmp_path: Path) -> None:
        self.everywhere(stopped, str(tmp_path), 8)
        with Trainer(backend="single", devices="cpu", seed=5, progress=False) as trainer:
            outcome = fit(
                trainer,
                self.make_reference(),
                checkpoint=Checkpoints(tmp_path, every_epochs=None),
                resume="auto",
            )
        expected = by_hand(self, CASES["plain"])
        assert_same(outcome.state, expected.state, depth="training")
        assert [r["samples"] for r in outcome.epochs] == [r["samples"] for r in expected.epochs]

    def test_a_signal_to_one_rank_ends_all_saved_at_the_same_step(self, tmp_path: Path) -> None:
        ends = self.everywhere(interrupted, str(tmp_path))
        assert len({checkpoint for _, checkpoint, _, _ in ends}) == 1
        for name, _, expected, resumed in ends:
            assert name == "SIGTERM"
            _assert_same_run(resumed, expected)

    def test_a_rank_that_is_killed_leaves_nobody_hanging_and_a_checkpoint(self, tmp_path: Path) -> None:
        ends = rank_outcomes(killed, self.processes, self, str(tmp_path), timeout_s=DEADLINE_S)
        assert ends[-1].exitcode == -9
        for end in ends[:-1]:
            assert end.error is not None, str(end)  # it raised, and was not ended at the deadline
        # On ranks again, and not here: with another number of threads, sums would round differently.
        for expected, outcome in run_ranks(resumed_after, self.processes, self, str(tmp_path)):
            _assert_same_run(outcome, expected)

    # -- Losses that are means over other units than samples --

    def weighed(self) -> list[dict[str, TrainingOutcome]]:
        """Return each rank's outcomes of all cases; the processes are started once."""
        kit = type(self)
        if "_weighed" not in kit.__dict__:
            kit._weighed = self.everywhere(trained_by_weights)
        return kit._weighed

    @pytest.mark.parametrize("way", WEIGHTED_CASES)
    def test_batches_count_by_their_weights(self, way: str) -> None:
        expected = weighted_by_hand(self, WEIGHTED_CASES[way])
        for outcomes in self.weighed():
            outcome = outcomes[way]
            assert_same(outcome.state, expected.state, depth="training")
            for record, wanted in zip(outcome.epochs, expected.epochs, strict=True):
                assert record["samples"] == wanted["samples"]
                for part in ("train", "val"):
                    for name, mean in wanted[part].items():
                        assert record[part][name] == pytest.approx(mean, rel=SAME.rtol), (part, name)

    def test_a_resumed_run_with_weights_is_the_uninterrupted_one_bit_for_bit(self, tmp_path: Path) -> None:
        for expected, outcomes in self.everywhere(resumed_by_weights, str(tmp_path), [3, 5, 8]):
            assert len(outcomes) == 3, "a run was not stopped"
            for outcome in outcomes:
                _assert_same_run(outcome, expected)

    def test_a_loop_of_ones_own_weighs_alike(self) -> None:
        model = self.make_reference()
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        for first in range(0, 22, BATCH_SIZE):
            x, y, counts = (t[first : first + BATCH_SIZE] for t in masked_data().tensors)
            if counts.any():
                optimizer.zero_grad()
                (model(x) - y).square()[counts].mean().backward()
                optimizer.step()
        with torch.no_grad():
            scores = model(masked_data(9).tensors[0])
        for state, gathered in self.everywhere(trained_in_own_loop):
            assert_same(state, dict(model.state_dict()), depth="training")
            assert_same({"scores": gathered}, {"scores": scores}, depth="training")


def _assert_same_run(actual: TrainingOutcome, expected: TrainingOutcome) -> None:
    assert actual.epochs == expected.epochs
    _assert_equal(actual.state, expected.state)


def _assert_equal(actual: State, expected: State) -> None:
    assert sorted(actual) == sorted(expected)
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name
