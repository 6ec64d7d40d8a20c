"""Stages on two accelerators: equal to one, and the host waits for nothing that it does not read."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from tp_trainer import Trainer

from tests.accelerator import GPU, KIND, SECOND, needs_two

pytestmark = [pytest.mark.gpu, needs_two]


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)])


def mean_square(model, batch):
    return F.mse_loss(model(batch), torch.zeros_like(batch))


def train(devices, steps, schedule=None):
    """Return the weights, and how often the host waited, where devices are simulated."""
    model = make_model()
    batches = list(torch.randn(steps, 8, 8, generator=torch.Generator().manual_seed(1)))
    options = {"pipeline": {"schedule": schedule}} if schedule else {}
    backend = "pipeline" if schedule else "single"
    before = waits()
    with Trainer(backend=backend, devices=devices, seed=0, progress=False, options=options) as trainer:
        trainer.fit(model, torch.optim.SGD(model.parameters(), lr=0.1), batches, step=mean_square)
        waited = waits() - before
        return {k: v.cpu() for k, v in trainer.session.model_state(model).items()}, waited


def waits():
    if KIND != "sim":
        return 0
    from tp_simulator._build import extension  # private: the count of this process

    return extension().counts().get("synchronizations", 0)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B", "ZBVZeroBubble"])
def test_stages_equal_one_cpu_and_no_step_waits(pair, schedule):
    expected, _ = train("cpu", 4)
    waited = {}
    for steps in (4, 8):
        for weights, count in pair.run(train, [GPU, SECOND], steps, schedule):
            waited[steps] = max(waited.get(steps, 0), count)
            if steps == 4:
                torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)
    assert waited[8] == waited[4]
