"""What every backend must do, as tests that its author subclasses."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tp_core._devices import resolve_devices
from tp_core._environment import LaunchEnvironment
from tp_core._job import Job, LossReduction
from tp_core._session import Session
from tp_core.errors import ConfigError, ModelError
from tp_core.testing._kit import ConformanceKit

__all__ = ["BackendConformance"]

Gradients = dict[str, Tensor]


class BackendConformance(ConformanceKit):
    """What every backend must do. A subclass of this, in a test module, names the backend.

    The proof is equality: losses, gradients and weights are those of one device that sees the
    whole batch, in double precision.

    Example:
        >>> class TestMine(BackendConformance):
        ...     backend = MyBackend
    """

    @staticmethod
    def gradients(session: Session, model: nn.Module) -> Gradients:
        """Return the whole gradients of a prepared model on the CPU, by the reference's names."""
        named = session.unwrap(model).named_parameters()
        return {n: p.grad.detach().cpu().clone() for n, p in named if p.grad is not None}

    # -- the tests --------------------------------------------------------------------------------

    def test_it_has_a_name_and_fits_the_job(self) -> None:
        assert isinstance(self.backend.name, str)
        assert self.backend.name
        for verdict in self.everywhere(_assess_twice):
            assert verdict[0] == verdict[1], "assess() must not depend on having been called before"
            assert verdict[0].is_fit, verdict[0].reason

    def test_loss_and_gradients_are_those_of_one_device(self) -> None:
        expected = _reference_gradients(self, samples=8, batch_size=8)
        for gradients in self.everywhere(_train_gradients, 8, 8, "mean"):
            _assert_same(gradients, expected)

    def test_uneven_batches_weigh_by_their_samples(self) -> None:
        expected = _reference_gradients(self, samples=11, batch_size=4)
        for gradients in self.everywhere(_train_gradients, 11, 4, "mean"):
            _assert_same(gradients, expected)

    def test_a_last_batch_of_one_sample_neither_hangs_nor_biases(self) -> None:
        expected = _reference_gradients(self, samples=5, batch_size=4)
        for gradients in self.everywhere(_train_gradients, 5, 4, "mean"):
            _assert_same(gradients, expected)

    def test_a_loss_that_is_a_sum_gives_the_gradient_of_the_sum(self) -> None:
        expected = _reference_gradients(self, samples=7, batch_size=4, loss="sum")
        for gradients in self.everywhere(_train_gradients, 7, 4, "sum"):
            _assert_same(gradients, expected)

    def test_accumulation_inside_no_sync_gives_the_gradient_of_the_whole(self) -> None:
        expected = _reference_gradients(self, samples=8, batch_size=8)
        for gradients in self.everywhere(_accumulated_gradients):
            _assert_same(gradients, expected)

    def test_optimizer_steps_lead_to_the_weights_of_one_device(self) -> None:
        expected = _reference_weights(self)
        for weights in self.everywhere(_trained_weights):
            _assert_same(weights, expected)

    def test_clipping_uses_the_global_norm(self) -> None:
        reference = self.make_reference()
        _batch_loss("mean")(reference, _data(8).tensors).backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.clip_grad_norm_(reference.parameters(), 1e-3)
        expected = {n: p.grad for n, p in reference.named_parameters() if p.grad is not None}
        for found, gradients in self.everywhere(_clipped):
            torch.testing.assert_close(found, norm)
            _assert_same(gradients, expected)

    def test_evaluation_sees_each_sample_once(self) -> None:
        with torch.no_grad():
            x, y = _data(11).tensors
            expected = nn.functional.mse_loss(self.make_reference()(x), y).item()
        for samples, loss in self.everywhere(_evaluated):
            assert samples == 11
            assert math.isclose(loss, expected, rel_tol=1e-9)

    def test_model_state_has_the_plain_names_and_comes_back(self) -> None:
        expected = self.make_reference().state_dict()
        for state, restored in self.everywhere(_state_round_trip):
            _assert_same(state, expected)
            _assert_same(restored, expected)

    def test_ranks_reduce_gather_and_broadcast(self) -> None:
        for total, gathered, ranks, first in self.everywhere(_communicated):
            size = len(gathered)
            assert total == size * (size + 1) / 2
            assert gathered == list(range(1, size + 1))
            assert ranks == list(range(self.processes))
            assert first == "from rank 0"

    def test_a_step_that_raises_is_raised_in_the_caller(self) -> None:
        for message in self.everywhere(_raising_step):
            assert "the step's own words" in message

    def test_a_wrapped_model_is_refused(self) -> None:
        for message in self.everywhere(_wrapped_model):
            assert "already wrapped" in message

    def test_an_unknown_option_is_refused(self) -> None:
        backend = self.backend()
        job = make_job(self, options={backend.name: {"no_such_option": 1}})
        with pytest.raises(ConfigError, match="no option 'no_such_option'"):
            backend.parse_options(job)

    def test_closing_twice_does_nothing(self) -> None:
        assert all(self.everywhere(_closed_twice))


def make_job(
    kit: ConformanceKit,
    *,
    model: nn.Module | None = None,
    loss: LossReduction = "mean",
    options: Mapping[str, Mapping[str, Any]] | None = None,
) -> Job:
    """Return the job that the kit gives to its backend."""
    return Job(
        devices=resolve_devices(list(kit.devices)),
        environment=LaunchEnvironment.read(),
        explicit_devices=True,
        model=model,
        seed=3,
        loss=loss,
        options={kit.backend.name: kit.options} if options is None else options,
    )


def _open(kit: BackendConformance, **job: Any) -> Session:
    return kit.backend().open(make_job(kit, **job))


def _data(samples: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(samples)
    x = torch.randn(samples, 6, dtype=torch.float64, generator=generator)
    return TensorDataset(x, torch.randn(samples, 3, dtype=torch.float64, generator=generator))


def _batch_loss(reduction: LossReduction) -> Callable[[nn.Module, Any], Tensor]:
    def step(model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(model(x), y, reduction=reduction)

    return step


def _reference_gradients(
    kit: BackendConformance, *, samples: int, batch_size: int, loss: LossReduction = "mean"
) -> Gradients:
    """Return the sum over the epoch's batches of one device's gradients."""
    model, step = kit.make_reference(), _batch_loss(loss)
    for batch in DataLoader(_data(samples), batch_size=batch_size):
        step(model, batch).backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def _reference_weights(kit: BackendConformance) -> Gradients:
    model, step = kit.make_reference(), _batch_loss("mean")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for _ in range(3):
        for batch in DataLoader(_data(11), batch_size=4):
            optimizer.zero_grad()
            step(model, batch).backward()  # type: ignore[no-untyped-call]  # as above
            optimizer.step()
    return dict(model.state_dict())


def _assert_same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert sorted(found) == sorted(expected)
    for name, tensor in expected.items():
        try:
            torch.testing.assert_close(found[name], tensor, rtol=1e-9, atol=1e-11)
        except AssertionError as error:
            error.add_note(f"in {name}")
            raise


# -- what runs on every rank ---------------------------------------------------------------------


def _assess_twice(kit: BackendConformance) -> tuple[Any, Any]:
    job, backend = make_job(kit, model=kit.make_model()), kit.backend()
    return backend.assess(job), backend.assess(job)


def _train_gradients(
    kit: BackendConformance, samples: int, batch_size: int, loss: LossReduction
) -> Gradients:
    model, step = kit.make_model(), _batch_loss(loss)
    with _open(kit, model=model, loss=loss) as session:
        model = session.prepare_model(model)
        for batch in session.prepare_loader(DataLoader(_data(samples), batch_size=batch_size)):
            session.backward(_loss(session.run(step, model, batch)))
        return kit.gradients(session, model)


def _accumulated_gradients(kit: BackendConformance) -> Gradients:
    model, step = kit.make_model(), _batch_loss("mean")
    with _open(kit, model=model) as session:
        model = session.prepare_model(model)
        first, second = session.prepare_loader(DataLoader(_data(8), batch_size=4))
        with session.no_sync(model):
            session.backward(_loss(session.run(step, model, first)) / 2)
        session.backward(_loss(session.run(step, model, second)) / 2)
        return kit.gradients(session, model)


def _trained_weights(kit: BackendConformance) -> Gradients:
    model, step = kit.make_model(), _batch_loss("mean")
    with _open(kit, model=model) as session:
        plain = torch.optim.Adam(model.parameters(), lr=0.05)
        model = session.prepare_model(model)
        optimizer = session.prepare_optimizer(plain)
        loader = session.prepare_loader(DataLoader(_data(11), batch_size=4))
        for _ in range(3):
            for batch in loader:
                optimizer.zero_grad()
                session.backward(_loss(session.run(step, model, batch)))
                optimizer.step()
        return _on_cpu(session.model_state(model))


def _clipped(kit: BackendConformance) -> tuple[Tensor, Gradients]:
    model = kit.make_model()
    with _open(kit, model=model) as session:
        model = session.prepare_model(model)
        (batch,) = session.prepare_loader(DataLoader(_data(8), batch_size=8))
        session.backward(_loss(session.run(_batch_loss("mean"), model, batch)))
        norm = session.clip_grad_norm(model, 1e-3)
        return norm.detach().cpu(), kit.gradients(session, model)


def _evaluated(kit: BackendConformance) -> tuple[int, float]:
    model, step = kit.make_model(), _batch_loss("mean")
    with _open(kit, model=model) as session:
        model = session.prepare_model(model).eval()
        loader = session.prepare_loader(DataLoader(_data(11), batch_size=5), training=False)
        total = torch.zeros(2, dtype=torch.float64)
        with torch.no_grad():
            session.sync_buffers(model)
            for batch in loader:
                loss = _loss(session.run(step, model, batch)).item()
                assert session.share is not None
                samples = session.share.samples
                total += torch.tensor([samples, samples * loss], dtype=torch.float64)
        samples, loss_sum = session.reduce(total.to(session.device), "sum").tolist()
        return int(samples), loss_sum / samples


def _state_round_trip(kit: BackendConformance) -> tuple[Gradients, Gradients]:
    model = kit.make_model()
    with _open(kit, model=model) as session:
        model = session.prepare_model(model)
        state = _on_cpu(session.model_state(model))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        session.load_model_state(model, state)
        return state, _on_cpu(session.model_state(model))


def _communicated(kit: BackendConformance) -> tuple[float, list[int], list[int], str]:
    with _open(kit) as session:
        mine = torch.tensor([session.data_rank + 1.0], device=session.device)
        total = session.reduce(mine, "sum").item()
        assert mine.item() == session.data_rank + 1, "reduce() must keep its argument"
        gathered = [int(v) for v in session.gather(mine).tolist()]
        ranks = session.gather_objects(session.rank)
        first = session.broadcast(f"from rank {session.rank}")
        session.barrier()
        assert session.is_main == (session.rank == 0)
        return total, gathered, ranks, first


def _raising_step(kit: BackendConformance) -> str:
    def step(_model: nn.Module, _batch: Any) -> Tensor:
        msg = "the step's own words"
        raise ValueError(msg)

    model = kit.make_model()
    with _open(kit, model=model) as session:
        model = session.prepare_model(model)
        batch = next(iter(session.prepare_loader(DataLoader(_data(4), batch_size=4))))
        with pytest.raises(Exception, match="the step's own words") as caught:
            session.run(step, model, batch)
        return str(caught.value)


def _wrapped_model(kit: BackendConformance) -> str:
    with _open(kit) as session, pytest.raises(ModelError) as caught:
        session.prepare_model(nn.DataParallel(kit.make_model()))
    return str(caught.value)


def _closed_twice(kit: BackendConformance) -> bool:
    session = _open(kit, model=kit.make_model())
    session.close()
    session.close()
    return True


def _loss(output: Any) -> Tensor:
    loss: Tensor = output["loss"] if isinstance(output, Mapping) else output
    return loss


def _on_cpu(state: Mapping[str, Tensor]) -> Gradients:
    return {name: tensor.detach().cpu().clone() for name, tensor in state.items()}
