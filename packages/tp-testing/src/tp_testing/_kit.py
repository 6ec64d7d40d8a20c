"""The base of a backend's conformance tests: the backend, its ranks, its model and its data."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Self

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from tp_core import LaunchEnvironment, resolve_devices
from tp_core.data import LossReduction, PreparedLoader, Share, StepOutput
from tp_core.errors import ConfigError
from tp_core.plugins import Backend, Job, Session
from tp_core.random import preserve_rng_state, seed_torch
from tp_core.ranks import run_ranks

State = dict[str, Tensor]
Shared = tuple[Any, Share | None]


class DeclaredLimits:
    """A test kit with declared limits in its subclasses.

    Attributes:
        limits: The reason for each test that cannot pass, by the test's name: ``{"test_...": "..."}``, with
            the parameters in brackets for one case of several. Such a test is expected to fail, and the
            report shows the reason; it is an error if it passes. All other tests run.
    """

    limits: ClassVar[Mapping[str, str]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Check that each declared limit names a test and has a reason.

        Raises:
            ConfigError: A limit names no test, or has no reason.
        """
        super().__init_subclass__(**kwargs)
        for name, reason in cls.limits.items():
            if not hasattr(cls, name.partition("[")[0]):
                msg = f"{cls.__name__} declares a limit of {name!r}, which is none of its tests"
                raise ConfigError(msg)
            if not reason:
                msg = f"the limit of {name!r} that {cls.__name__} declares needs a reason"
                raise ConfigError(msg)

    def subject(self) -> str:
        """Return the name of the implementation under test for reports."""
        return type(self).__name__

    @pytest.fixture(autouse=True)
    def _declared_limits(self, request: pytest.FixtureRequest) -> None:
        reason = self.limits.get(request.node.name) or self.limits.get(request.node.originalname)
        if reason is not None:
            mark = pytest.mark.xfail(reason=f"declared limit of {self.subject()!r}: {reason}", strict=True)
            request.node.add_marker(mark)


class Tail(nn.Module):
    """A module with the cases that backends often get wrong: (batch, features) -> (batch, features).

    A batch norm has floating-point and integer buffers. It stays in evaluation mode, since the statistics
    of a part of a batch differ from the whole batch's. One weight is used in two places, one layer is
    frozen, and one parameter has a single element.
    """

    def __init__(self, features: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(features)
        self.norm.running_mean = torch.randn(features) / 4
        self.norm.running_var = torch.rand(features) + 0.5
        self.forth = nn.Linear(features, features, bias=False)
        self.back = nn.Linear(features, features, bias=False)
        self.back.weight = self.forth.weight
        self.frozen = nn.Linear(features, features).requires_grad_(requires_grad=False)
        self.scale = nn.Parameter(torch.tensor([1.5]))
        self.train()

    def train(self, mode: bool = True) -> Self:
        """Set the mode of all but the batch norm."""
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        x = self.back(torch.tanh(self.forth(x)))
        output: Tensor = self.scale * (x + self.frozen(x))
        return output


class ConformanceKit(DeclaredLimits):
    """A backend under test. Subclasses hold the tests; a subclass of these names the backend.

    Attributes:
        backend: The backend under test.
        devices: The devices of each process.
        processes: The number of processes; real ones are started.
        options: Options for the backend, beside its own ``self_test_options``.
        unused_options: Further options for steps that do not use every parameter.
    """

    backend: ClassVar[type[Backend[Any]]]
    devices: ClassVar[Iterable[str]] = ("cpu",)
    processes: ClassVar[int] = 1
    options: ClassVar[Mapping[str, Any]] = {}
    unused_options: ClassVar[Mapping[str, Any]] = {}

    def subject(self) -> str:
        """Return the name of the backend."""
        return self.backend.name

    def job_options(self, **more: Any) -> dict[str, dict[str, Any]]:
        """Return the options of a job on the backend under test, with ``more`` for one test."""
        return {self.backend.name: {**self.backend.self_test_options, **self.options, **more}}

    @staticmethod
    def make_model() -> nn.Module:
        """Return a model with the same weights on every call; its inputs are (batch, 6).

        It has the cases that backends often get wrong: a weight in two places, frozen parameters, one with
        fewer elements than ranks, a batch norm with buffers. A backend for another kind of models overrides
        it and returns one that computes the same.
        """
        with preserve_rng_state():
            seed_torch(7)
            return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3), Tail(3)).double()

    @staticmethod
    def make_reference() -> nn.Module:
        """Return the model with the same outputs on one device."""
        return ConformanceKit.make_model()

    def everywhere(self, body: Callable[..., Any], *args: Any) -> list[Any]:
        """Run ``body(self, *args)`` on every rank, each in a new process, and return the results.

        Raises:
            RankFailedError: A rank raised, died or took too long.
        """
        if self.processes == 1:
            return [body(self, *args)]
        return run_ranks(body, self.processes, self, *args)

    @staticmethod
    def gradients(session: Session, model: nn.Module) -> State:
        """Return the whole gradients of a prepared model on the CPU, by the reference's names.

        A backend with its own way to split parameters overrides it.

        Collective: an all-gather for each DTensor.
        """
        named = session.unwrap(model).named_parameters()
        return on_cpu({n: whole_tensor(p.grad) for n, p in named if p.grad is not None})


def whole_tensor(tensor: Tensor) -> Tensor:
    """Return the whole of a tensor that may be sharded. Collective: an all-gather of a shard."""
    full: Any = getattr(tensor, "full_tensor", None)
    return tensor if full is None else full()


def make_job(
    kit: ConformanceKit,
    *,
    model: nn.Module | None = None,
    loss: LossReduction = "mean",
    options: Mapping[str, Mapping[str, Any]] | None = None,
) -> Job:
    """Return the job that the kit gives to its backend."""
    options = kit.job_options() if options is None else options
    return Job(
        devices=resolve_devices(list(kit.devices)),
        environment=LaunchEnvironment.read(),
        explicit_devices=True,
        model=model,
        seed=3,
        loss=loss,
        options=options,
    )


def open_session(kit: ConformanceKit, **job: Any) -> Session:
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


def with_shares(batches: PreparedLoader) -> Iterator[Shared]:
    for batch in batches:
        yield batch, batches.share


def whole(session: Session, samples: int = 8, dtype: torch.dtype = torch.float64) -> Shared:
    """Return one batch of all samples, as the session's loader yields it, with its share."""
    loader = session.prepare_loader(DataLoader(data(samples, dtype), batch_size=samples))
    (shared,) = with_shares(loader)
    return shared


def learn(session: Session, model: nn.Module, shared: Shared, step: Any = None) -> None:
    """Add the gradients of a step on a batch with its share, by default of :func:`batch_loss`."""
    batch, share = shared
    session.backward(loss_of(session.run(step or batch_loss(), model, batch)), share)


def train(
    session: Session,
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    *,
    samples: int = 12,
    batch_size: int = 4,
    epochs: int = 1,
    step: Any = None,
    after_step: Callable[[], object] = lambda: None,
) -> State:
    """Return the weights of a prepared model after some epochs, an optimizer step for each batch."""
    loader = session.prepare_loader(DataLoader(data(samples), batch_size=batch_size))
    for _ in range(epochs):
        for shared in with_shares(loader):
            for optimizer in optimizers:
                optimizer.zero_grad()
            learn(session, model, shared, step)
            for optimizer in optimizers:
                optimizer.step()
            after_step()
    return on_cpu(session.model_state(model))


def batch_loss(reduction: LossReduction = "mean") -> Callable[[nn.Module, Any], StepOutput]:
    def step(model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(model(x), y, reduction=reduction)

    return step


def loss_of(output: Any) -> Tensor:
    loss: Tensor = output["loss"] if isinstance(output, Mapping) else output
    return loss


def on_cpu(state: Mapping[str, Tensor]) -> State:
    return {name: tensor.detach().cpu().clone() for name, tensor in state.items()}


def sorted_rows(rows: Tensor) -> Tensor:
    """Return rows in the order of their first column: a backend may give its parts samples in any order."""
    return rows[rows[:, 0].argsort()]
