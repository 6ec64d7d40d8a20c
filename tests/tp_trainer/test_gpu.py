"""The trainer on an accelerator: alone, with one rank, and with two, each with a card where there are two."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader
from tp_core import LaunchEnvironment, resolve_devices
from tp_core.plugins import Job
from tp_testing import BackendConformance, TrainingConformance, run_ranks
from tp_trainer import Checkpoints, Trainer
from tp_trainer._checkpoint._host_copies import HostCopies  # private: how often a save waits

from tests.accelerator import COLLECTIVES, GPU, group_of_two
from tests.installed import backend_class
from tests.models import perceptron
from tests.reference_training import rows_and_sums, squared_error

DdpBackend = backend_class("ddp")
FsdpBackend = backend_class("fsdp")
SingleBackend = backend_class("single")

pytestmark = pytest.mark.gpu


make_model = functools.partial(perceptron, 4, 32, 1, dtype=torch.float32)


def make_data(n=48):
    return rows_and_sums(n, 4, dtype=torch.float32, curved=True)


def fit(devices=GPU, *, epochs=2, pin_memory=False, workers=0, **options):
    """Train; return the weights, on the CPU."""
    given = {k: options.pop(k) for k in ("checkpoint", "resume") if k in options}
    with Trainer(devices=devices, seed=5, progress=False, **options) as trainer:
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        loader = DataLoader(make_data(), batch_size=8, pin_memory=pin_memory, num_workers=workers)
        trainer.fit(model, optimizer, loader, step=squared_error, epochs=epochs, **given)
        return {name: value.cpu() for name, value in model.state_dict().items()}


def by_hand(dtype=None, epochs=2):
    """The same loop written out."""
    model = make_model().to(GPU)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    kind = torch.device(GPU).type
    scaler = torch.amp.GradScaler(kind, enabled=dtype is torch.float16)
    for _ in range(epochs):
        for x, y in DataLoader(make_data(), batch_size=8):
            batch = x.to(GPU), y.to(GPU)
            optimizer.zero_grad()
            with torch.autocast(kind, dtype=dtype or torch.bfloat16, enabled=dtype is not None):
                loss = squared_error(model, batch)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    return {name: value.cpu() for name, value in model.state_dict().items()}


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [("fp32", None), ("bf16-mixed", torch.bfloat16), ("fp16-mixed", torch.float16)],
)
def test_fit_leads_where_the_loop_written_out_leads(precision, dtype):
    found = fit(precision=precision)
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype is None else {"rtol": 0.05, "atol": 5e-3}
    torch.testing.assert_close(found, by_hand(dtype), **tolerance)


def test_pinned_batches_of_loader_workers_lead_to_the_same_weights():
    torch.testing.assert_close(fit(pin_memory=True, workers=2), fit(), rtol=0, atol=0)


@pytest.mark.parametrize("precision", ["fp32", "fp16-mixed"])
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(tmp_path, precision):
    whole = fit(epochs=3, precision=precision)
    fit(epochs=1, precision=precision, checkpoint=Checkpoints(tmp_path / "run"))
    checkpoint = Checkpoints(tmp_path / "run")
    resumed = fit(epochs=3, precision=precision, checkpoint=checkpoint, resume="auto")
    torch.testing.assert_close(resumed, whole, rtol=0, atol=0)


def test_a_run_of_the_card_goes_on_on_the_host(tmp_path):
    fit(epochs=1, checkpoint=Checkpoints(tmp_path / "run"))
    found = fit("cpu", epochs=2, checkpoint=Checkpoints(tmp_path / "run"), resume="auto")
    torch.testing.assert_close(found, fit("cpu", epochs=2), rtol=1e-3, atol=1e-4)


def one_rank(device, backend, options, process_group):
    job = Job(
        devices=resolve_devices(device),
        environment=LaunchEnvironment.read({}),
        explicit_devices=True,
        options={backend.name: options},
    )
    with backend.open(job) as session:
        model = session.prepare_model(make_model())
        assert dist.get_backend() == process_group
        if options.get("offload"):
            assert {p.device.type for p in model.parameters()} == {"cpu"}
        optimizer = session.prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range(3):
            optimizer.zero_grad()
            for batch in session.prepare_loader(DataLoader(make_data(), batch_size=16)):
                session.backward(session.run(squared_error, model, batch))
            norm = session.clip_grad_norm(model, 1.0)
            assert norm.device == torch.device(device)
            optimizer.step()
        session.barrier()
        assert session.broadcast("word") == "word"
        return {name: value.cpu() for name, value in session.model_state(model).items()}


@pytest.mark.parametrize(
    ("backend", "options"),
    [
        (DdpBackend(), {"process_group": COLLECTIVES}),
        (FsdpBackend(), {"units": nn.Linear}),
        (FsdpBackend(), {"units": nn.Linear, "offload": True, "activation_checkpointing": True}),
    ],
)
def test_one_rank_takes_the_steps_of_one_device(backend, options):
    (found,) = run_ranks(one_rank, 1, GPU, backend, options, COLLECTIVES, timeout_s=90)
    model = make_model().to(GPU)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        for batch in DataLoader(make_data(), batch_size=16):
            squared_error(model, [value.to(GPU) for value in batch]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    expected = {name: value.cpu() for name, value in model.state_dict().items()}
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def fit_on_ranks(process_group, devices):
    return fit(list(devices), backend="ddp", options={"ddp": {"process_group": process_group}})


@pytest.mark.timeout(120)
def test_two_ranks_take_the_steps_of_one_device():
    found = run_ranks(fit_on_ranks, 2, *group_of_two(), timeout_s=110)
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)
    torch.testing.assert_close(found[0], fit(), rtol=1e-4, atol=1e-5)


@pytest.mark.sync_budget(2)
def test_all_tensors_of_a_save_come_in_one_wait_and_into_the_same_memory():
    tensors = {f"{i}": torch.full((i, 3), float(i), device=GPU) for i in range(20)}
    tensors["columns"] = torch.arange(12.0, device=GPU).reshape(3, 4).T
    tensors["half"] = torch.ones(5, dtype=torch.bfloat16, device=GPU)
    copies = HostCopies()
    first, second = copies.take(tensors), copies.take(tensors)
    for name, copy in second.items():
        assert copy.data_ptr() == first[name].data_ptr()
        assert copy.is_pinned() == (copy.numel() > 0)
        assert copy.untyped_storage().nbytes() == copy.nbytes
        assert copy.stride() == tensors[name].stride()
    assert all(second[f"{i}"].eq(i).all() for i in range(20))
    assert torch.equal(second["columns"], torch.arange(12.0).reshape(3, 4).T)
    assert second["half"].eq(1).all()


class TestSingle(BackendConformance):
    backend = SingleBackend
    devices = (GPU,)


class TestTraining(TrainingConformance):
    backend = SingleBackend
    devices = (GPU,)
