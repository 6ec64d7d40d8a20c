"""The conformance tests of a step's "weight" on every backend, a base of `TrainingConformance`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from tp_core.data import StepOutput
from tp_core.testing import ConformanceKit

from tp_trainer import Checkpoints, GradientRules
from tp_trainer.testing._runs import RATE, Outcome, State, StoppedError, fit, make_trainer

BATCH_SIZE, EPOCHS = 4, 2


@dataclass(frozen=True, slots=True)
class Way:
    """One way to train.

    Attributes:
        trainer: Arguments of the trainer.
        gradients: The rules for the gradients.
    """

    trainer: Mapping[str, Any] = field(default_factory=dict)
    gradients: GradientRules = field(default_factory=GradientRules)


WAYS = {
    "each batch": Way(),
    "accumulate 2": Way({"accumulate": 2}),
    "accumulate 4": Way({"accumulate": 4}),
    "accumulate and clip": Way({"accumulate": 2}, GradientRules(clip_norm=0.05, clip_value=0.02)),
    "nonfinite skip": Way(gradients=GradientRules(nonfinite="skip")),
    "sum": Way({"loss": "sum"}, GradientRules(clip_norm=0.05)),
    "sum and accumulate": Way({"loss": "sum", "accumulate": 2}, GradientRules(clip_norm=0.05)),
}


def data(samples: int = 22) -> TensorDataset:
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


class WeightConformance(ConformanceKit):
    """The conformance tests of losses that are means over other units than samples."""

    _weighed: ClassVar[list[dict[str, Outcome]]]

    def weighed(self) -> list[dict[str, Outcome]]:
        """Return each rank's outcomes of all ways; the processes are started once."""
        kit = type(self)
        if "_weighed" not in kit.__dict__:
            kit._weighed = self.everywhere(_trained_in_all_ways)
        return kit._weighed

    @pytest.mark.parametrize("way", WAYS)
    def test_batches_count_by_their_weights(self, way: str) -> None:
        expected = _by_hand(self, WAYS[way])
        for outcomes in self.weighed():
            found = outcomes[way]
            _assert_close(found.state, expected.state)
            for record, wanted in zip(found.epochs, expected.epochs, strict=True):
                assert record["samples"] == wanted["samples"]
                for part in ("train", "val"):
                    for name, mean in wanted[part].items():
                        assert record[part][name] == pytest.approx(mean, rel=1e-8), (part, name)

    def test_a_resumed_run_with_weights_is_the_uninterrupted_one_bit_for_bit(self, tmp_path: Path) -> None:
        for expected, found in self.everywhere(_resumed, str(tmp_path), [3, 5, 8]):
            assert len(found) == 3, "a run was not stopped"
            for outcome in found:
                assert outcome.epochs == expected.epochs
                for name, tensor in expected.state.items():
                    assert torch.equal(outcome.state[name], tensor), name

    def test_a_loop_of_ones_own_weighs_alike(self) -> None:
        model = self.make_reference()
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        for first in range(0, 22, BATCH_SIZE):
            x, y, counts = (t[first : first + BATCH_SIZE] for t in data().tensors)
            if counts.any():
                optimizer.zero_grad()
                (model(x) - y).square()[counts].mean().backward()
                optimizer.step()
        with torch.no_grad():
            scores = model(data(9).tensors[0])
        for state, gathered in self.everywhere(_own_loop):
            _assert_close(state, dict(model.state_dict()))
            torch.testing.assert_close(gathered, scores, rtol=1e-8, atol=1e-10)


def _assert_close(found: State, expected: State) -> None:
    assert sorted(found) == sorted(expected)
    for name, tensor in expected.items():
        assert torch.isfinite(found[name]).all(), f"{name} holds NaN: a part of weight 0 was not left out"
        torch.testing.assert_close(found[name], tensor, rtol=1e-8, atol=1e-10)


def _by_hand(kit: ConformanceKit, way: Way) -> Outcome:
    """Train the reference on one device, with the data of each optimizer step as one batch."""
    model = kit.make_reference()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    is_sum = way.trainer.get("loss") == "sum"
    size = BATCH_SIZE * way.trainer.get("accumulate", 1)
    tensors = data().tensors
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
            (total if is_sum else total / counts.sum()).backward()
            if way.gradients.clip_value is not None:
                nn.utils.clip_grad_value_(model.parameters(), way.gradients.clip_value)
            if way.gradients.clip_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), way.gradients.clip_norm)
            optimizer.step()
        with torch.no_grad():
            x, y, counts = data(9).tensors
            val = _sums((model(x) - y).square(), counts)
        records.append(
            {"samples": len(tensors[0]), "train": _means(sums, is_sum), "val": _means(val, is_sum)}
        )
    return Outcome(dict(model.state_dict()), records)


def _sums(errors: Tensor, counts: Tensor) -> Tensor:
    errors = errors.detach()
    return torch.stack([errors[counts].sum(), counts.sum(), errors.sum(), torch.tensor(errors.numel())])


def _means(sums: Tensor, is_sum: bool) -> dict[str, float]:
    counted, units, total, elements = sums.tolist()
    return {"loss": counted / units} if is_sum else {"loss": counted / units, "error": total / elements}


# -- on every rank --------------------------------------------------------------------------------


def _trained_in_all_ways(kit: ConformanceKit) -> dict[str, Outcome]:
    outcomes = {}
    for name, way in WAYS.items():
        with make_trainer(kit, **way.trainer) as trainer:
            outcomes[name] = fit(
                trainer,
                kit.make_model(),
                step=total_error if way.trainer.get("loss") == "sum" else masked_error,
                data=data(),
                validation=DataLoader(data(9), batch_size=BATCH_SIZE),
                gradients=way.gradients,
            )
    return outcomes


def _resumed(kit: ConformanceKit, folder: str, stops: list[int]) -> tuple[Outcome, list[Outcome]]:
    """Return an uninterrupted run, and runs that were stopped at batches and resumed."""

    def train(place: str | None, stop: int, **arguments: Any) -> Outcome:
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
            return fit(trainer, kit.make_model(), step=step, data=data(), shuffle=True, **arguments)

    outcomes = []
    for stop in stops:
        place = str(Path(folder, str(stop)))
        try:
            train(place, stop)
        except StoppedError:
            outcomes.append(train(place, 0, resume="auto"))
    return train(None, 0), outcomes


def _own_loop(kit: ConformanceKit) -> tuple[State, Tensor]:
    """Train and evaluate in a custom loop; return the state, and the scores of all samples."""

    def scores(model: nn.Module, batch: Any) -> StepOutput:
        return {"loss": torch.zeros(()), "scores": model(batch[0])}

    with make_trainer(kit) as trainer:
        plain = kit.make_model()
        optimizer = torch.optim.SGD(plain.parameters(), lr=RATE)
        model, optimizer, loader = trainer.prepare(plain, optimizer, DataLoader(data(), BATCH_SIZE))
        for batch in loader:
            optimizer.zero_grad()
            trainer.backward(trainer.run(masked_error, model, batch))
            optimizer.step()
        rows = []
        with torch.no_grad():
            for batch in trainer.prepare(DataLoader(data(9), BATCH_SIZE), training=False):
                rows.append(trainer.gather_for_metrics(trainer.run(scores, model, batch))["scores"].cpu())
        state = {n: t.detach().cpu().clone() for n, t in trainer.session.model_state(model).items()}
        return state, torch.cat(rows)
