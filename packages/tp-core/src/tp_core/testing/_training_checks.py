"""The functions that a backend's conformance tests run on ranks: gradients, norms and steps."""

import gc
import math
import random
import signal
import threading
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from tp_core._contracts._session import Session
from tp_core._data._step_outputs import LossReduction
from tp_core._launch._environment import LaunchEnvironment
from tp_core.errors import StepError
from tp_core.testing._kit import (
    ConformanceKit,
    State,
    batch_loss,
    data,
    learn,
    loss_of,
    on_cpu,
    open_session,
    prepared,
    train,
    whole,
    with_shares,
)
from tp_core.testing._session_checks import environment_now

# -- on one device --------------------------------------------------------------------------------


def reference_gradients(
    kit: ConformanceKit, *, samples: int, batch_size: int, loss: LossReduction = "mean"
) -> State:
    """Return one device's gradients, summed over the batches of an epoch."""
    model, step = kit.make_reference(), batch_loss(loss)
    for batch in DataLoader(data(samples), batch_size=batch_size):
        loss_of(step(model, batch)).backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def reference_weights(kit: ConformanceKit) -> State:
    model, step = kit.make_reference(), batch_loss()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for _ in range(3):
        for batch in DataLoader(data(11), batch_size=4):
            optimizer.zero_grad()
            loss_of(step(model, batch)).backward()
            optimizer.step()
    return dict(model.state_dict())


def reference_with_unused(kit: ConformanceKit) -> State:
    model, step = _WithUnused(kit.make_reference()), batch_loss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for batch in DataLoader(data(12), batch_size=4):
        optimizer.zero_grad()
        loss_of(step(model, batch)).backward()
        optimizer.step()
    return dict(model.state_dict())


class _WithUnused(nn.Module):
    """A model with a layer that its forward leaves out."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.unused = nn.Linear(2, 2, bias=False).double()
        nn.init.ones_(self.unused.weight)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.inner(x)
        return output


def of_several_types(model: nn.Module) -> nn.Module:
    """Return the model with one parameter, of a single element, in single precision."""
    tail: Any = model.get_submodule("3")
    tail.scale = nn.Parameter(tail.scale.detach().float())
    return model


# -- on every rank --------------------------------------------------------------------------------


def train_gradients(kit: ConformanceKit, samples: int, batch_size: int, loss: LossReduction) -> State:
    with prepared(kit, loss=loss) as (session, model):
        loader = session.prepare_loader(DataLoader(data(samples), batch_size=batch_size))
        for shared in with_shares(loader):
            learn(session, model, shared, batch_loss(loss))
        return kit.gradients(session, model)


def gradients_without_a_share(kit: ConformanceKit) -> tuple[int, State]:
    """Return the gradients of a batch of which each data rank has as many samples."""
    with prepared(kit) as (session, model):
        loader = session.prepare_loader(DataLoader(data(5), batch_size=5))
        learn(session, model, next(with_shares(loader)))  # an uneven batch before it does not weigh its loss
        model.zero_grad()
        batch, _ = whole(session, samples=4 * session.data_size)
        learn(session, model, (batch, None))
        return session.data_size, kit.gradients(session, model)


def single_precision(kit: ConformanceKit) -> State:
    with prepared(kit, kit.make_model().float()) as (session, model):
        learn(session, model, whole(session, dtype=torch.float32))
        return kit.gradients(session, model)


def several_types(kit: ConformanceKit) -> State:
    with prepared(kit, of_several_types(kit.make_model())) as (session, model):
        learn(session, model, whole(session))
        return kit.gradients(session, model)


def dict_gradients(kit: ConformanceKit) -> State:
    def step(model: nn.Module, batch: Any) -> dict[str, Any]:
        loss = loss_of(batch_loss()(model, batch))
        return {"loss": loss, "half": loss.detach() / 2}

    with prepared(kit) as (session, model):
        learn(session, model, whole(session), step)
        return kit.gradients(session, model)


def accumulated_gradients(kit: ConformanceKit) -> State:
    def step(model: nn.Module, batch: Any) -> Tensor:
        return loss_of(batch_loss()(model, batch)) / 2

    with prepared(kit) as (session, model):
        first, second = with_shares(session.prepare_loader(DataLoader(data(8), batch_size=4)))
        with session.no_sync(model):
            learn(session, model, first, step)
        learn(session, model, second, step)
        return kit.gradients(session, model)


def held_gradients(kit: ConformanceKit) -> tuple[int, State]:
    """Return the gradients on a rank before they are reduced."""
    with prepared(kit) as (session, model):
        shared = whole(session)
        with session.no_sync(model):
            learn(session, model, shared)
        named = session.unwrap(model).named_parameters()
        held = {n: p.grad for n, p in named if p.grad is not None}
        plain = {n: g for n, g in held.items() if not hasattr(g, "full_tensor")}
        seen = on_cpu(plain)
        learn(session, model, shared)
        return session.data_size, seen


def gradients_after_an_exception(kit: ConformanceKit) -> State:
    with prepared(kit) as (session, model):
        shared = whole(session)
        error = LookupError("out of no_sync")
        with pytest.raises(LookupError, match="out of no_sync"), session.no_sync(model):
            raise error
        learn(session, model, shared)
        return kit.gradients(session, model)


def trained_with_unused(kit: ConformanceKit) -> State:
    model = _WithUnused(kit.make_model())
    options = {kit.backend.name: {**kit.options, **kit.unused_options}}
    with open_session(kit, model=model, options=options) as session:
        plain = torch.optim.SGD(model.parameters(), lr=0.05)
        wrapped = session.prepare_model(model)
        return train(session, wrapped, [session.prepare_optimizer(plain)])


def trained_weights(kit: ConformanceKit) -> State:
    model = kit.make_model()
    with open_session(kit, model=model) as session:
        plain = torch.optim.Adam(model.parameters(), lr=0.05)
        model = session.prepare_model(model)
        return train(session, model, [session.prepare_optimizer(plain)], samples=11, epochs=3)


def who_is_trained(kit: ConformanceKit) -> tuple[bool, bool]:
    model = kit.make_model()
    with open_session(kit, model=model) as session:
        plain = torch.optim.SGD(model.parameters(), lr=0.05)
        own = session.unwrap(session.prepare_model(model))
        optimizer = session.prepare_optimizer(plain)
        trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
        return own is model, trained == {id(p) for p in own.parameters()}


def start_from_different_weights(kit: ConformanceKit) -> State:
    model = kit.make_model()
    with open_session(kit, model=model) as session:
        with torch.no_grad():
            for tensor in [*model.parameters(), *model.buffers()]:
                tensor.add_(session.data_rank)
        prepared_model = session.prepare_model(model)
        return on_cpu(session.model_state(prepared_model))


ALONE_S = 60.0  # for a busy machine; it is waited for only where there is no answer
NORMS = [1.0, 2.0, math.inf]


def reference(kit: ConformanceKit) -> nn.Module:
    model = kit.make_reference()
    loss_of(batch_loss()(model, data(8).tensors)).backward()
    return model


def gradients(model: nn.Module) -> State:
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


# -- on every rank --------------------------------------------------------------------------------


def _run_backward(session: Session, model: nn.Module, factor: float = 1.0) -> None:
    learn(session, model, whole(session), lambda model, batch: loss_of(batch_loss()(model, batch)) * factor)


def clipped(kit: ConformanceKit, norm_type: float) -> tuple[Tensor, State]:
    with prepared(kit) as (session, model):
        _run_backward(session, model)
        norm = session.clip_grad_norm(model, 1e-3, norm_type=norm_type)
        return norm.detach().cpu(), kit.gradients(session, model)


def norms(kit: ConformanceKit, norm_type: float) -> tuple[Tensor, Tensor, State]:
    with prepared(kit) as (session, model):
        _run_backward(session, model)
        norm = session.grad_norm(model, norm_type=norm_type)
        unlimited = session.clip_grad_norm(model, math.inf, norm_type=norm_type)
        return norm.detach().cpu(), unlimited.detach().cpu(), kit.gradients(session, model)


def scaled(kit: ConformanceKit) -> State:
    with prepared(kit) as (session, model):
        _run_backward(session, model)
        session.scale_gradients(model, 0.5)
        return kit.gradients(session, model)


def limited(kit: ConformanceKit) -> State:
    with prepared(kit) as (session, model):
        _run_backward(session, model)
        session.clip_grad_value(model, 0.01)
        return kit.gradients(session, model)


def not_finite(kit: ConformanceKit) -> tuple[Any, Any]:
    with prepared(kit) as (session, model):
        before = session.find_nonfinite(model)
        with torch.no_grad():
            last = [p for p in session.unwrap(model).parameters() if p.requires_grad][-1]
            last.mul_(math.nan)
        return before, session.find_nonfinite(model)


def asked_alone(kit: ConformanceKit) -> bool:
    with prepared(kit) as (session, model):
        if session.rank != 0:
            return True
        answers = []
        # In a thread: a call that waits for other ranks would hang this one, and the test with it.
        thread = threading.Thread(target=lambda: answers.append(session.find_nonfinite(model)), daemon=True)
        thread.start()
        thread.join(ALONE_S)
        return bool(answers)


def norm_of_bad_gradients(kit: ConformanceKit) -> float:
    with prepared(kit) as (session, model):
        # Only the first data rank's part is bad; what comes of it must be known everywhere.
        _run_backward(session, model, factor=math.nan if session.data_rank == 0 else 1.0)
        return session.grad_norm(model).item()


RATE = 0.05


def grouped(model: nn.Module) -> torch.optim.Optimizer:
    first, *others = model.parameters()
    groups = [{"params": others, "lr": 0.02, "weight_decay": 0.1}, {"params": [first], "momentum": 0.5}]
    return torch.optim.SGD(groups, lr=RATE, momentum=0.9, nesterov=True)


def scheduled(model: nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)


@torch.no_grad()
def shifted(model: nn.Module) -> nn.Module:
    """Return the model with other weights."""
    for parameter in model.parameters():
        parameter.mul_(1.5)
    return model


def loss_of_two(one: nn.Module, other: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return nn.functional.mse_loss(one(x), y) + nn.functional.mse_loss(other(2 * x), y)


class _Branches(nn.Module):
    """A model with a layer that a step may leave out; with it, its output follows the model's."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.more = nn.Linear(3, 2, bias=False).double()
        nn.init.constant_(self.more.weight, 0.5)

    def forward(self, x: Tensor, *, with_more: bool) -> Tensor:
        output: Tensor = self.inner(x)
        return torch.cat([output, self.more(output)], 1) if with_more else output


def _with_branch(output: Tensor, y: Tensor) -> Tensor:
    """Return the loss of an output (samples, 3), or (samples, 5) where the layer took part."""
    loss = nn.functional.mse_loss(output[:, :3], y)
    return loss + output[:, 3:].square().mean() if output.size(1) > 3 else loss


def reference_with_branches(kit: ConformanceKit, size: int) -> State:
    """Return the weights where the loss is the mean over data ranks, of which the first has one term more."""
    model = _Branches(kit.make_reference())
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for x, y in DataLoader(data(4 * size), batch_size=2 * size):
        optimizer.zero_grad()
        parts = zip(x.tensor_split(size), y.tensor_split(size), strict=True)
        losses = [_with_branch(model(p, with_more=i == 0), q) for i, (p, q) in enumerate(parts)]
        (sum(losses, torch.zeros(())) / size).backward()
        optimizer.step()
    return dict(model.state_dict())


# -- on every rank --------------------------------------------------------------------------------


def trained_with_own_branches(kit: ConformanceKit) -> tuple[int, State]:
    model = _Branches(kit.make_model())
    options = {kit.backend.name: {**kit.options, **kit.unused_options}}
    with open_session(kit, model=model, options=options) as session:
        is_first, size = session.data_rank == 0, session.data_size

        def step(model: nn.Module, batch: Any) -> Tensor:
            return _with_branch(model(batch[0], with_more=is_first), batch[1])

        plain = torch.optim.SGD(model.parameters(), lr=RATE)
        wrapped = session.prepare_model(model)
        optimizers = [session.prepare_optimizer(plain)]
        return size, train(session, wrapped, optimizers, samples=4 * size, batch_size=2 * size, step=step)


def modes_in_steps(kit: ConformanceKit, training: bool) -> tuple[bool, list[bool]]:
    """Return the mode after the model is prepared, and the modes in steps after it is set."""
    model = kit.make_model()
    found = []

    def step(model: nn.Module, batch: Any) -> Tensor:
        found.append(model.training)
        return loss_of(batch_loss()(model, batch))

    with prepared(kit, model) as (session, wrapped):
        first = model.training
        wrapped.train(training)
        batch, _ = whole(session)
        session.run(step, wrapped, batch)
        with torch.no_grad():
            session.run(step, wrapped, batch)
        return first, [*found, model.training]


def returned(kit: ConformanceKit) -> tuple[float, dict[str, float]]:
    def step(model: nn.Module, batch: Any) -> dict[str, Any]:
        loss = loss_of(batch_loss()(model, batch))
        return {"twice": 2 * loss.detach(), "loss": loss, "more": loss.detach() + 1}

    with prepared(kit) as (session, model):
        output: Any = session.run(step, model, whole(session)[0])
        return output["loss"].item(), {n: float(v) for n, v in output.items() if n != "loss"}


def gradients_of_two_models(kit: ConformanceKit) -> tuple[State, State] | None:
    one, other = kit.make_model(), shifted(kit.make_model())
    with open_session(kit, model=one) as session:
        models = [session.prepare_model(one), session.prepare_model(other)]
        batch, share = whole(session)
        try:
            output = session.run_several(loss_of_two, models, batch)
        except StepError:
            if not session.runs_step_in_parts:
                raise
            return None
        session.backward(loss_of(output), share)
        return kit.gradients(session, models[0]), kit.gradients(session, models[1])


def retains_the_graph(kit: ConformanceKit) -> bool:
    with prepared(kit) as (session, model):
        batch, share = whole(session)
        loss = loss_of(session.run(batch_loss(), model, batch))
        scale = torch.ones_like(loss).requires_grad_()
        scaled = loss * scale.square()  # keeps the scale for its own backward pass
        session.backward(scaled, share, retain_graph=True)
        (found,) = torch.autograd.grad(scaled, [scale])
        return torch.allclose(found, 2 * loss.detach())


def trained_in_groups(kit: ConformanceKit) -> State:
    model = kit.make_model()
    with open_session(kit, model=model) as session:
        plain = grouped(model)
        wrapped = session.prepare_model(model)
        return train(session, wrapped, [session.prepare_optimizer(plain)], epochs=2)


def trained_on_schedule(kit: ConformanceKit) -> State:
    model = kit.make_model()
    with open_session(kit, model=model) as session:
        plain, scheduler = scheduled(model)
        wrapped = session.prepare_model(model)
        return train(session, wrapped, [session.prepare_optimizer(plain)], after_step=scheduler.step)


def gradients_beside_bad_stand_ins(kit: ConformanceKit) -> State:
    with prepared(kit) as (session, model):
        for batch, share in with_shares(session.prepare_loader(DataLoader(data(5), batch_size=4))):
            loss = loss_of(session.run(batch_loss(), model, batch))
            is_stand_in = share is not None and not share.samples
            session.backward(loss * math.nan if is_stand_in else loss, share)
        return kit.gradients(session, model)


def shuffled(kit: ConformanceKit) -> tuple[int, list[list[Tensor]]]:
    met: list[Tensor] = []

    def step(model: nn.Module, batch: Any) -> Tensor:
        met.append(batch[0].cpu())
        return loss_of(batch_loss()(model, batch))

    with prepared(kit) as (session, model):
        loader = session.prepare_loader(DataLoader(data(12), batch_size=4, shuffle=True))
        epochs: list[list[Tensor]] = []
        for _ in range(2):
            epochs.append([])
            for batch in loader:
                met.clear()
                with torch.no_grad():
                    session.run(step, model, batch)
                epochs[-1].append(torch.cat(met))
        return session.data_rank, epochs


RATES = 0.05, 0.02


def make_optimizers(model: nn.Module, *, several: bool) -> list[torch.optim.Optimizer]:
    """Return one optimizer over all parameters, or one over the first and one over all others."""
    first, *others = model.parameters()
    parts = [[first], others] if several else [[first, *others]]
    return [torch.optim.SGD(part, lr=rate, momentum=0.9) for part, rate in zip(parts, RATES, strict=False)]


# -- on every rank --------------------------------------------------------------------------------


def trained(kit: ConformanceKit, late: bool, several: bool) -> State:
    model = kit.make_model()
    with open_session(kit, model=model) as session:
        plain = [] if late else make_optimizers(model, several=several)
        wrapped = session.prepare_model(model)
        if late:
            plain = make_optimizers(session.unwrap(wrapped), several=several)
        return train(session, wrapped, [session.prepare_optimizer(optimizer) for optimizer in plain])


def evaluated_frozen(kit: ConformanceKit) -> tuple[State, torch.Tensor]:
    model = kit.make_model().requires_grad_(requires_grad=False)
    outputs = []

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        outputs.append(model(batch[0]).cpu())
        return loss_of(batch_loss()(model, batch))

    with open_session(kit, model=model) as session, torch.no_grad():
        wrapped = session.prepare_model(model)
        loader = session.prepare_loader(DataLoader(data(8), batch_size=8), training=False)
        for batch in loader:
            session.run(step, wrapped, batch)
        rows = session.gather(torch.cat(outputs).to(session.device)).cpu()
        return on_cpu(session.model_state(wrapped)), rows


# By mode: whether a step has gradients, whether it computes in lower precision, and what of.
MODES = {
    "plain": (True, False, torch.float32),
    "no_grad": (False, False, torch.float32),
    "autocast": (True, True, torch.bfloat16),
    "no_grad and autocast": (False, True, torch.bfloat16),
}
THREADS, ENDING_S = "the threads", 10.0
DRAWN = ("torch's generator", "Python's generator", "numpy's generator")


class _Nested(Dataset[Any]):
    """The samples of the other tests, as dicts with further entries."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Any]:
        x, y = data(8)[index]
        return {"x": x, "targets": {"y": y, "halves": (y / 2, y / 4)}, "number": index}


# -- on every rank --------------------------------------------------------------------------------


def modes(kit: ConformanceKit, mode: str) -> list[tuple[bool, bool, torch.dtype]]:
    found = []

    def step(model: nn.Module, batch: Any) -> Tensor:
        x = batch[0]
        product = nn.functional.linear(x, x)
        found.append((torch.is_grad_enabled(), torch.is_autocast_enabled(x.device.type), product.dtype))
        return loss_of(batch_loss()(model, batch))

    with prepared(kit, kit.make_model().float()) as (session, model):
        batch, _ = whole(session, dtype=torch.float32)
        autocast: AbstractContextManager[Any] = nullcontext()
        if "autocast" in mode:
            autocast = torch.autocast(session.device.type, dtype=torch.bfloat16)
        with torch.set_grad_enabled("no_grad" not in mode), autocast:
            session.run(step, model, batch)
    return found


def drawn(kit: ConformanceKit) -> list[str]:
    model = kit.make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    # So that a generator which is seeded does not come back to where it was, nor to where another rank's is.
    for _ in range(1 + LaunchEnvironment.read().rank):
        torch.rand(1), random.random()  # noqa: S311
    before = environment_now()
    with open_session(kit, model=model) as session:
        session.prepare_model(model)
        session.prepare_optimizer(optimizer)
        session.prepare_loader(DataLoader(data(8), batch_size=4, shuffle=True))
        return _changed(before, environment_now(), DRAWN)


def left_behind(kit: ConformanceKit) -> list[str]:
    model = kit.make_model()  # one that is split may need the group before
    before = {**environment_now(), **_handlers()}
    _make_one_step(kit, model)
    del model
    names = [name for name in before if name not in DRAWN]
    deadline = time.monotonic() + ENDING_S
    while True:  # threads that were asked to end may need a moment
        gc.collect()
        changed = _changed(before, {**environment_now(), **_handlers()}, names)
        if changed != [THREADS] or time.monotonic() > deadline:
            return changed
        time.sleep(0.01)


def _make_one_step(kit: ConformanceKit, model: nn.Module) -> None:
    with prepared(kit, model) as (session, wrapped):
        learn(session, wrapped, whole(session))


def _handlers() -> dict[str, Any]:
    return {f"the handler of {s.name}": signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}


def _changed(before: Mapping[str, Any], after: Mapping[str, Any], names: Any) -> list[str]:
    return [name for name in names if before[name] != after[name]]


def gradients_of_nested_batches(kit: ConformanceKit) -> State:
    def step(model: nn.Module, batch: dict[str, Any]) -> Tensor:
        y = batch["targets"]["y"]
        half, quarter = batch["targets"]["halves"]
        assert len(batch["number"]) == len(y)
        return nn.functional.mse_loss(model(batch["x"]), half + 2 * quarter)

    with prepared(kit) as (session, model):
        (shared,) = with_shares(session.prepare_loader(DataLoader(_Nested(), batch_size=8)))
        learn(session, model, shared, step)
        return kit.gradients(session, model)
