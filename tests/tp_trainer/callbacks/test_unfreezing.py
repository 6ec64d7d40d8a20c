"""Parameters are trained from the epoch that was said, on every backend."""

import cloudpickle
import pytest
import torch
from tp_core.errors import ConfigError
from tp_trainer import Callback
from tp_trainer.callbacks import GradualUnfreezing

from tests.tp_trainer import callback_run
from tests.tp_trainer.callback_run import network, same, stop, train

cloudpickle.register_pickle_by_value(callback_run)  # for ranks, which do not know this folder

EPOCHS = {1: ["3"], 2: ["0.weight"]}


class Moved(Callback):
    """Keeps which parameters each epoch has moved."""

    def __init__(self):
        self.names = []

    def on_epoch_start(self, run):
        self.before = {name: p.detach().clone() for name, p in run.model.named_parameters()}

    def on_epoch_end(self, run):
        self.names.append([n for n, p in run.model.named_parameters() if not torch.equal(p, self.before[n])])


def moved(backend):
    callback = Moved()
    train([callback, GradualUnfreezing(EPOCHS)], backend=backend, clip_norm=0.1)
    return callback.names


@pytest.mark.parametrize("backend", ["single", "tuple", "dp-gather"])
def test_parameters_are_trained_from_their_epoch_on(backend):
    assert moved(backend) == [["3.weight", "3.bias"], ["0.weight", "3.weight", "3.bias"]]


def test_parameters_are_trained_from_their_epoch_on_over_ranks(two_ranks):
    assert two_ranks.run(moved, "ddp") == [[["3.weight", "3.bias"], ["0.weight", "3.weight", "3.bias"]]] * 2


def test_what_is_frozen_is_not_clipped_with():
    def only_head(model):
        return torch.optim.AdamW(model[3].parameters(), lr=0.05)

    one, other = network(), network()
    for name, parameter in one.named_parameters():
        parameter.requires_grad = name.startswith("3")
    train([], model=one, optimizer=only_head(one), clip_norm=0.1)
    train([GradualUnfreezing({1: ["3"]})], model=other, clip_norm=0.1)
    assert same(one, other)


def test_a_resumed_run_goes_on_with_what_was_frozen(tmp_path):
    whole, _ = train([GradualUnfreezing(EPOCHS)])
    stop(7, [GradualUnfreezing(EPOCHS)], folder=tmp_path)
    assert same(train([GradualUnfreezing(EPOCHS)], folder=tmp_path)[0], whole)


@pytest.mark.parametrize("epochs", [{0: ["3"]}, {1: "3"}, {1: [3]}, {"1": ["3"]}])
def test_what_is_not_epochs_with_prefixes_is_refused(epochs):
    with pytest.raises(ConfigError, match="takes epochs from 1, each with a list of prefixes"):
        GradualUnfreezing(epochs)


def test_a_prefix_of_no_parameter_is_named():
    with pytest.raises(ConfigError, match=r"no parameter's name begins with 'tail'; they are 0\.weight"):
        train([GradualUnfreezing({1: ["tail"]})])
