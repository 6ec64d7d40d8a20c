"""The trainer on a CUDA device: alone, with NCCL and one rank, with gloo and two ranks on one card."""

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

from tests.installed import backend_class
from tests.models import perceptron
from tests.reference_training import rows_and_sums, squared_error

DdpBackend = backend_class("ddp")
FsdpBackend = backend_class("fsdp")
SingleBackend = backend_class("single")

GPU = "cuda:0"
NCCL = "nccl"

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
        (DdpBackend(), {"process_group": NCCL}),
        (FsdpBackend(), {"units": nn.Linear}),
        (FsdpBackend(), {"units": nn.Linear, "offload": True, "activation_checkpointing": True}),
    ],
)
def test_one_rank_over_nccl_takes_the_steps_of_one_device(backend, options):
    (found,) = run_ranks(one_rank, 1, GPU, backend, options, NCCL, timeout_s=90)
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


def fit_on_ranks(device, processes):
    options = {"backend": "ddp", "options": {"ddp": {"process_group": "gloo"}}}
    return fit([device] * processes, **options)


@pytest.mark.timeout(120)
def test_two_ranks_on_one_card_over_gloo_take_the_steps_of_one_device():
    found = run_ranks(fit_on_ranks, 2, GPU, 2, timeout_s=110)
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)
    torch.testing.assert_close(found[0], fit(), rtol=1e-4, atol=1e-5)


class TestSingle(BackendConformance):
    backend = SingleBackend
    devices = (GPU,)


class TestTraining(TrainingConformance):
    backend = SingleBackend
    devices = (GPU,)
