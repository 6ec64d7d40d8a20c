"""What the conformance tests of a backend have in common, here and on the ranks."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tp_core._contracts._job import Job
from tp_core._contracts._session import Session, StepOutput
from tp_core._devices._resolve import resolve_devices
from tp_core._launch._environment import LaunchEnvironment
from tp_core._steps._outputs import LossReduction
from tp_core.testing._kit import ConformanceKit

__all__ = [
    "State",
    "assert_same",
    "batch_loss",
    "data",
    "loss_of",
    "make_job",
    "on_cpu",
    "open_session",
    "prepared",
    "whole",
]

State = dict[str, Tensor]


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


def open_session(kit: ConformanceKit, **job: Any) -> Session:
    """Open a session on the backend under test; arguments as of :func:`make_job`."""
    return kit.backend().open(make_job(kit, **job))


@contextmanager
def prepared(
    kit: ConformanceKit, model: nn.Module | None = None, **job: Any
) -> Iterator[tuple[Session, nn.Module]]:
    """Open a session and prepare a model, the kit's own by default."""
    model = kit.make_model() if model is None else model
    with open_session(kit, model=model, **job) as session:
        yield session, session.prepare_model(model)


def data(samples: int, dtype: torch.dtype = torch.float64) -> TensorDataset:
    """Return inputs (samples, 6) and targets (samples, 3), the same on every call."""
    generator = torch.Generator().manual_seed(samples)
    x = torch.randn(samples, 6, dtype=torch.float64, generator=generator)
    y = torch.randn(samples, 3, dtype=torch.float64, generator=generator)
    return TensorDataset(x.to(dtype), y.to(dtype))


def whole(session: Session, samples: int = 8, dtype: torch.dtype = torch.float64) -> Any:
    """Return one batch of all samples, as the session's loader gives it."""
    (batch,) = session.prepare_loader(DataLoader(data(samples, dtype), batch_size=samples))
    return batch


def batch_loss(reduction: LossReduction = "mean") -> Callable[[nn.Module, Any], StepOutput]:
    """Return the step of all tests."""

    def step(model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(model(x), y, reduction=reduction)

    return step


def loss_of(output: Any) -> Tensor:
    """Return the loss of what a step returned."""
    loss: Tensor = output["loss"] if isinstance(output, Mapping) else output
    return loss


def on_cpu(state: Mapping[str, Tensor]) -> State:
    """Return copies of tensors on the CPU."""
    return {name: tensor.detach().cpu().clone() for name, tensor in state.items()}


def assert_same(
    found: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    *,
    rtol: float = 1e-9,
    atol: float = 1e-11,
    check_dtype: bool = True,
) -> None:
    """Make sure that tensors have the same names and, to rounding, the same values."""
    assert sorted(found) == sorted(expected)
    for name, tensor in expected.items():
        try:
            torch.testing.assert_close(found[name], tensor, rtol=rtol, atol=atol, check_dtype=check_dtype)
        except AssertionError as error:
            error.add_note(f"in {name}")
            raise
