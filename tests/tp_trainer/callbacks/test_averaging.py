"""Averages are torch's own, on every backend, in validations, in files and after a resume."""

import signal

import cloudpickle
import pytest
import torch
from safetensors.torch import load_file
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader
from tp_core.errors import ConfigError
from tp_testing import run_ranks
from tp_trainer import Callback, Interrupted, Trainer, Validation
from tp_trainer.callbacks import ExponentialMovingAverage, StochasticWeightAveraging

from tests.cases import first_fast
from tests.reference_training import squared_error
from tests.tp_trainer import callback_run
from tests.tp_trainer.callback_run import data, network, same, stop, train

cloudpickle.register_pickle_by_value(callback_run)  # for ranks, which do not know this folder

DECAY = 0.8


class TorchAverage(Callback):
    """Torch's own average, beside the run."""

    def on_fit_start(self, run):
        self.averaged = AveragedModel(run.model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
        self.val = []

    def on_step_end(self, run):
        self.averaged.update_parameters(run.model)

    def on_validation_start(self, run):
        batches = list(DataLoader(data(7), batch_size=7))
        self.averaged.module.load_state_dict(dict(run.model.named_buffers()), strict=False)
        self.averaged.eval()
        with torch.no_grad():
            self.val.append(squared_error(self.averaged.module, batches[0]).item())


def fused(model):
    return torch.optim.Adam(model.parameters(), lr=0.05, fused=True)


@pytest.mark.parametrize("make_optimizer", first_fast([fused, lambda _: None]), ids=["fused", "adamw"])
@pytest.mark.parametrize("backend", ["single", "tuple", "dp-gather"])
def test_the_average_is_that_of_torch_and_validations_see_it(backend, make_optimizer):
    theirs, ours = TorchAverage(), ExponentialMovingAverage(DECAY)
    model = network()
    _, history = train([theirs, ours], backend=backend, model=model, optimizer=make_optimizer(model))
    for name, average in ours.averages.items():
        torch.testing.assert_close(average, theirs.averaged.module.get_parameter(name), rtol=1e-12, atol=0)
    assert [record.val["loss"] for record in history] == pytest.approx(theirs.val, rel=1e-9)
    plain = network()
    train([], backend=backend, model=plain, optimizer=make_optimizer(plain))
    assert same(model, plain)  # training has not seen the average


class TorchSwa(Callback):
    """Torch's own SWA, beside the run."""

    def on_epoch_end(self, run):
        if run.epoch == 2:
            self.averaged = AveragedModel(run.model)
        if run.epoch >= 2:
            self.averaged.update_parameters(run.model)


@pytest.mark.parametrize("backend", ["single", "tuple"])
def test_stochastic_weight_averaging_is_that_of_torch(backend):
    theirs = TorchSwa()
    by_epoch, by_step = StochasticWeightAveraging(2), StochasticWeightAveraging(start_step=6)
    train([theirs, by_epoch, by_step], backend=backend, epochs=4)
    for name, average in by_epoch.averages.items():
        expected = theirs.averaged.module.get_parameter(name)
        torch.testing.assert_close(average, expected, rtol=1e-12, atol=0)
        assert torch.equal(average, by_step.averages[name])


def test_validations_see_the_models_own_weights_before_the_first_update():
    plain, ours = train([])[1], train([ExponentialMovingAverage(DECAY, every_steps=6)])[1]
    assert ours[0].val == plain[0].val
    assert ours[1].val != plain[1].val


def test_a_checkpoint_of_an_average_without_its_number_of_updates_is_continued():
    average = ExponentialMovingAverage(DECAY)
    model = torch.nn.Linear(3, 1).double()
    zeros = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    average.load_state_dict({"averages": zeros, "step": 3})
    train([average], model=model, epochs=1, optimizer=torch.optim.SGD(model.parameters(), lr=0.0))
    for name, parameter in model.named_parameters():  # lr=0: five updates from zero to the same weights
        torch.testing.assert_close(average.averages[name], parameter.detach() * (1 - DECAY**5))


@pytest.mark.parametrize("given", [{}, {"start_epoch": 1, "start_step": 1}])
def test_stochastic_weight_averaging_takes_one_start(given):
    with pytest.raises(ConfigError, match="takes either start_epoch or start_step"):
        StochasticWeightAveraging(**given)


def linear(state):
    model = torch.nn.Linear(3, 1).double()
    model.load_state_dict(state)
    return model


def on_a_rank(folder, state, averages, swa_averages):
    ours, swa = ExponentialMovingAverage(DECAY), StochasticWeightAveraging(1)
    model, history = train([ours, swa], backend="ddp", model=linear(state))
    for name, average in ours.averages.items():
        torch.testing.assert_close(average, averages[name], rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(swa.averages[name], swa_averages[name], rtol=1e-9, atol=1e-12)
    stop(7, [ExponentialMovingAverage(DECAY)], backend="ddp", folder=folder, model=linear(state))
    again = ExponentialMovingAverage(DECAY)
    resumed, _ = train([again], backend="ddp", folder=folder, model=linear(state))
    assert same(resumed, model)
    assert all(torch.equal(again.averages[name], average) for name, average in ours.averages.items())
    return history[-1].val["loss"]


@pytest.mark.slow
def test_ranks_have_the_average_of_one_device_and_resume_it(tmp_path):
    # No batch norm, of whose statistics each rank would have its own.
    ours, swa = ExponentialMovingAverage(DECAY), StochasticWeightAveraging(1)
    model = torch.nn.Linear(3, 1).double()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    _, history = train([ours, swa], model=model)
    losses = run_ranks(on_a_rank, 2, tmp_path, state, dict(ours.averages), dict(swa.averages))
    assert losses == pytest.approx([history[-1].val["loss"]] * 2, rel=1e-9)


@pytest.mark.parametrize(
    "make",
    [lambda: ExponentialMovingAverage(DECAY, every_steps=2), lambda: StochasticWeightAveraging(1)],
    ids=["ema", "swa"],
)
def test_a_resumed_average_is_the_same_bit_for_bit(tmp_path, make):
    whole = make()
    model, history = train([whole])
    stop(1, [make()], folder=tmp_path)  # before the first update
    stop(7, [make()], folder=tmp_path)
    again = make()
    resumed, records = train([again], folder=tmp_path)
    assert same(model, resumed)
    assert all(torch.equal(again.averages[name], average) for name, average in whole.averages.items())
    assert records[-1].val == history[-1].val


def test_the_average_is_exported_on_demand(tmp_path):
    average = ExponentialMovingAverage(DECAY, validate=False)
    model, _ = train([average])
    trained = {name: p.clone() for name, p in model.named_parameters()}
    with Trainer(devices="cpu", progress=False) as trainer, average.in_place_of(model):
        trainer.export(model, tmp_path / "average.safetensors")
    stored = load_file(tmp_path / "average.safetensors")
    assert all(torch.equal(stored[name], value) for name, value in average.averages.items())
    assert all(torch.equal(p, trained[name]) for name, p in model.named_parameters())


def test_a_validation_that_fails_leaves_the_model_its_weights():
    def fails(model, batch):
        msg = "on purpose"
        raise RuntimeError(msg)

    average = ExponentialMovingAverage(DECAY)
    model = network()
    with pytest.raises(RuntimeError, match="on purpose"):
        train([average], model=model, validation=Validation(DataLoader(data(7), batch_size=4), step=fails))
    plain = network()
    train([], model=plain, epochs=1)
    assert same(model, plain)


def test_a_signal_in_a_validation_saves_the_models_own_weights(tmp_path):
    def interrupted(model, batch):
        signal.raise_signal(signal.SIGTERM)
        return squared_error(model, batch)

    whole, again = ExponentialMovingAverage(DECAY), ExponentialMovingAverage(DECAY)
    with pytest.raises(Interrupted):
        train(
            [ExponentialMovingAverage(DECAY)],
            folder=tmp_path,
            validation=Validation(DataLoader(data(7), batch_size=4), step=interrupted),
        )
    model, _ = train([whole])
    resumed, _ = train([again], folder=tmp_path)
    assert same(resumed, model)
    assert all(torch.equal(again.averages[name], average) for name, average in whole.averages.items())


@pytest.mark.parametrize("decay", [1, -0.1, "0.9"])
def test_a_wrong_decay_is_refused(decay):
    with pytest.raises(ConfigError, match="must be from 0 up to but not including 1"):
        ExponentialMovingAverage(decay)


def test_an_average_of_another_model_is_refused():
    average = ExponentialMovingAverage()
    with (
        pytest.raises(ConfigError, match="there is no average of this model's weights"),
        average.in_place_of(network()),
    ):
        pass
    train([average])
    with pytest.raises(ConfigError, match="one of another model's weights"):
        train([average], model=torch.nn.Linear(3, 1).double())
