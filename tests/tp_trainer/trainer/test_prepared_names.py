"""What of a model's own can be read from what `prepare` returned, with one rank and with two."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tp_core.errors import ModelError
from tp_trainer import Trainer


class Coder(nn.Module):
    """Has values, a method and a submodule of its own."""

    def __init__(self):
        super().__init__()
        self.config = {"width": 2}
        self.layer = nn.Linear(2, 2)
        self.scale = nn.Parameter(torch.ones(2))

    def encode(self, x):
        return self.layer(x) * self.scale

    def forward(self, x):
        return self.encode(x)


def _read():
    with Trainer(seed=0, progress=False, devices="cpu") as trainer:
        plain = Coder()
        model = trainer.prepare(plain)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        values = model.config, model.scale is plain.scale
        messages = []
        for name in ("encode", "layer", "missing"):
            try:
                getattr(model, name)
            except AttributeError as error:
                messages.append(str(error))
        own = trainer.session.unwrap(model)
        with torch.no_grad():
            encoded = tuple(own.encode(torch.ones(1, 2)).shape)
        rows = torch.full((1, 2), float(trainer.rank))
        trainer.backward(trainer.run(lambda model, batch: model.encode(batch).sum(), model, rows), weight=1)
        optimizer.step()
        copied = copy.deepcopy(own).config
        return values, messages, encoded, copied, model.scale.tolist()


def test_values_are_read_as_from_the_model_itself(two_ranks):
    one, two = two_ranks.run(_read)
    assert one == two
    (config, same), _, encoded, copied, _ = one
    assert (config, same, encoded, copied) == ({"width": 2}, True, (1, 2), {"width": 2})
    (config, same), messages, *_ = _read()
    assert (config, same) == ({"width": 2}, True)
    assert len(messages) == 1  # with one rank there is no wrapper, and all but the missing one is there


def _item():
    with Trainer(seed=0, devices="cpu", progress=False) as trainer:
        model = trainer.prepare(nn.Sequential(nn.Linear(2, 2)))
        with pytest.raises(ModelError) as refused:
            model[0]
        own = trainer.session.unwrap(model)[0]
        return str(refused.value), tuple(own.weight.shape)


def test_a_part_of_a_sequence_is_taken_in_a_step_or_from_the_plain_model(two_ranks):
    for message, shape in two_ranks.run(_item):
        assert message.startswith("the model's part [0] is not called from outside of a step")
        assert message.endswith("trainer.session.unwrap(model)[0]")
        assert shape == (2, 2)


def _replaced():
    with Trainer(seed=0, devices="cpu", progress=False) as trainer:
        model = trainer.prepare(nn.Sequential(nn.Linear(2, 2)))
        with pytest.raises(ModelError) as refused:
            model[0] = nn.Linear(2, 3)
        by_number = str(refused.value)
        model.head = nn.Linear(2, 3)
        optimizer = torch.optim.SGD(trainer.session.unwrap(model).parameters(), lr=0.1)
        data = DataLoader(TensorDataset(torch.ones(4, 2)), batch_size=2)
        with pytest.raises(ModelError) as refused:
            trainer.fit(model, optimizer, data, step=lambda model, batch: model(batch[0]).mean())
        return by_number, str(refused.value)


def test_a_part_that_is_replaced_after_the_preparation_is_refused(two_ranks):
    for by_number, by_name in two_ranks.run(_replaced):
        for part, message in (("[0]", by_number), (".head", by_name)):
            assert message.startswith(
                f"the part {part} of the model was set to a Linear after it was prepared"
            )
            assert f"set it first: model{part} = ..., and then trainer.prepare(model" in message


def test_what_can_be_called_is_called_in_a_step_or_from_the_plain_model(two_ranks):
    (_, (encode, layer, missing), *_), _ = two_ranks.run(_read)
    for name, message in (("encode", encode), ("layer", layer)):
        assert message.startswith(f"'{name}' of the model is not called from outside of a step")
        assert message.endswith(f"trainer.session.unwrap(model).{name}")
    assert "has no attribute 'missing'" in missing
