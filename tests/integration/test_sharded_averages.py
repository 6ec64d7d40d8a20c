"""A moving average of a model that is split over ranks is that of the whole one, also after a resume."""

import contextlib

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from tp_testing import run_ranks

from tests.models import perceptron
from tests.reference_training import StoppedError, squared_error

pytestmark = pytest.mark.slow

DECAY = 0.8


def data():
    x = torch.randn(24, 6, generator=torch.Generator().manual_seed(0)).double()
    return TensorDataset(x, x.sin())


def fit(average, *, group_size=None, folder=None, stop_at=None):
    """Train, and return the validation losses and the averaged weights of the whole model."""
    import tp_shard as ts
    from tp_trainer import Callback, Checkpoints, Trainer

    class Stop(Callback):
        def on_step_end(self, run):
            if run.step == stop_at:
                raise StoppedError

    model = perceptron(6, 8, 6)
    if group_size is not None:
        convert = ts.nn.ParallelLinear.convert_parallel_linear
        model[0], model[2] = convert(model[0], 1), convert(model[2], 0)
    with Trainer(seed=4, progress=False) as trainer:
        history = trainer.fit(
            model,
            torch.optim.Adam(model.parameters(), lr=0.02),
            DataLoader(data(), batch_size=6, shuffle=True),
            step=squared_error,
            epochs=2,
            validation=DataLoader(data(), batch_size=12),
            callbacks=[average, Stop()],
            checkpoint=None if folder is None else Checkpoints(folder, every_steps=1),
            resume=None if folder is None else "auto",
        )
        with average.in_place_of(model):
            state = trainer.session.model_state(model)
            averages = {name: value.clone() for name, value in state.items()}
        return [record.val["loss"] for record in history], averages


def on_a_rank(group_size, folder):
    import tp_shard as ts
    from tp_trainer.callbacks import ExponentialMovingAverage

    ts.distributed.init_process_group(group_size)
    whole = fit(ExponentialMovingAverage(DECAY), group_size=group_size)
    with contextlib.suppress(StoppedError):
        fit(ExponentialMovingAverage(DECAY), group_size=group_size, folder=folder, stop_at=5)
    resumed = fit(ExponentialMovingAverage(DECAY), group_size=group_size, folder=folder)
    assert whole[0] == resumed[0]
    assert all(torch.equal(value, resumed[1][name]) for name, value in whole[1].items())
    return whole


@pytest.mark.parametrize(("processes", "group_size"), [(2, -1), (4, 2)])
def test_averages_of_shards_are_those_of_the_whole(tmp_path, processes, group_size):
    from tp_trainer.callbacks import ExponentialMovingAverage

    losses, averages = fit(ExponentialMovingAverage(DECAY))
    for found, state in run_ranks(on_a_rank, processes, group_size, tmp_path):
        assert found == pytest.approx(losses, rel=1e-7)
        for name, value in averages.items():
            torch.testing.assert_close(state[name], value, rtol=1e-7, atol=1e-9)
