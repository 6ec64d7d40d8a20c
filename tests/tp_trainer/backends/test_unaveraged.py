"""What would let ranks part without a word is refused before the optimizer steps."""

import functools
import logging
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from tp_core.errors import ModelError, SelectionError, StepError
from tp_trainer import Trainer

from tests.models import perceptron
from tests.reference_training import rows_and_sums, squared_error

make_model = functools.partial(perceptron, 2, 3, 1)


def loader():
    return DataLoader(rows_and_sums(11, 2), batch_size=4)


def refused(body, backend):
    """Return the message of the error in which a loop ends, and whether it came before a step."""
    model = make_model()
    with Trainer(seed=0, devices="cpu", backend=backend, progress=False) as trainer:
        prepared, optimizer, batches = trainer.prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.1), loader()
        )
        before = [p.detach().clone() for p in model.parameters()]
        with pytest.raises(StepError) as caught:
            body(trainer, model, prepared, optimizer, batches)
        same = all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=False))
    return str(caught.value), same


def another_type(trainer, model, prepared, optimizer, batches):
    model.float()
    for x, y in batches:
        trainer.backward(trainer.run(squared_error, prepared, (x.float(), y.float())))
        optimizer.step()


def one_more_parameter(trainer, _model, prepared, optimizer, batches):
    scale = nn.Parameter(torch.ones((), dtype=torch.float64))
    optimizer.add_param_group({"params": [scale]})
    for batch in batches:
        trainer.backward(trainer.run(lambda m, b: squared_error(m, b) * scale, prepared, batch))
        optimizer.step()


def one_more_parameter_later(trainer, model, prepared, optimizer, batches):
    scale = nn.Parameter(torch.ones((), dtype=torch.float64))
    optimizer.add_param_group({"params": [scale]})
    optimizer.param_groups[0]["lr"] = 0.0
    for number, batch in enumerate(batches):
        used = scale if number else scale.detach()
        trainer.backward(trainer.run(lambda m, b, used=used: squared_error(m, b) * used, prepared, batch))
        optimizer.step()


def one_more_layer(trainer, model, prepared, optimizer, batches):
    model.append(nn.Linear(1, 1).double())
    optimizer.add_param_group({"params": list(model[-1].parameters())})
    for batch in batches:
        trainer.backward(trainer.run(squared_error, prepared, batch))
        optimizer.step()


def test_a_model_of_another_type_than_when_it_was_prepared_is_refused(two_ranks):
    for message, _ in two_ranks.run(partial(refused, another_type, "ddp")):
        assert message.startswith("'0.weight' of the model was torch.float64 when it was prepared")


@pytest.mark.parametrize("backend", ["ddp", "fsdp"])
@pytest.mark.parametrize("body", [one_more_parameter, one_more_parameter_later, one_more_layer])
def test_an_optimizer_with_parameters_of_no_prepared_model_is_refused(two_ranks, body, backend):
    for message, is_untouched in two_ranks.run(partial(refused, body, backend)):
        assert "parameter(s) that no prepared model has (shape (" in message
        assert is_untouched


def _of_its_own(prepares_model):
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("tp_core").addHandler(handler)
    model, probe = make_model(), nn.Linear(2, 1).double()
    with Trainer(seed=0, devices="cpu", backend="ddp", progress=False) as trainer:
        batches = trainer.prepare(loader())
        prepared = trainer.prepare(model) if prepares_model else None
        optimizer = torch.optim.SGD(probe.parameters(), lr=0.1)
        for batch in batches:
            if prepared is not None:
                trainer.backward(trainer.run(squared_error, prepared, batch))
            squared_error(probe, batch).backward()
            optimizer.step()
    logging.getLogger("tp_core").removeHandler(handler)
    return lines


@pytest.mark.parametrize("prepares_model", [True, False])
def test_an_optimizer_that_was_not_prepared_for_a_model_that_was_not_is_told_once(two_ranks, prepares_model):
    for lines in two_ranks.run(partial(_of_its_own, prepares_model)):
        assert len(lines) == 1
        assert "SGD, was not prepared, and steps parameters of no prepared model" in lines[0]


def _by_another_pass(kind):
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("tp_core").addHandler(handler)
    model = make_model()
    with Trainer(seed=0, devices="cpu", backend="ddp", progress=False) as trainer:
        plain = torch.optim.SGD(model.parameters(), lr=0.1)
        prepared, optimizer, batches = trainer.prepare(model, plain, loader())
        for _ in range(2):
            for batch in batches:
                optimizer.zero_grad()
                loss = squared_error(prepared, batch)
                if kind == "loss.backward()":
                    loss.backward()
                elif kind == "torch.autograd.grad()":
                    parameters = list(model.parameters())
                    for parameter, gradient in zip(
                        parameters, torch.autograd.grad(loss, parameters), strict=True
                    ):
                        parameter.grad = gradient
                else:
                    trainer.backward(loss)
                optimizer.step()
    logging.getLogger("tp_core").removeHandler(handler)
    return lines


@pytest.mark.parametrize("kind", ["loss.backward()", "torch.autograd.grad()", "trainer.backward()"])
def test_gradients_of_no_backward_pass_of_the_trainer_are_told_once(two_ranks, kind):
    for lines in two_ranks.run(partial(_by_another_pass, kind)):
        assert len(lines) == (kind != "trainer.backward()")
        assert all(
            line.startswith("there was no trainer.backward() before this step of SGD") for line in lines
        )


def _several_losses_of_two_models():
    """Return weights after steps in which each model has a forward pass for each backward pass."""
    first, second = make_model(), make_model()
    with Trainer(seed=0, devices="cpu", progress=False) as trainer:
        a, b, batches = trainer.prepare(first, second, loader())
        one = torch.optim.SGD(first.parameters(), lr=0.1)
        two = torch.optim.SGD(second.parameters(), lr=0.1)
        for batch in batches:
            for model, optimizer in ((a, one), (b, two), (a, one)):
                optimizer.zero_grad()
                trainer.backward(trainer.run(squared_error, model, batch))
                trainer.backward(trainer.run(squared_error, model, batch))
                optimizer.step()
    return [p.detach() for model in (first, second) for p in model.parameters()]


def test_several_passes_with_a_forward_pass_each_are_those_of_one_device(two_ranks):
    alone = _several_losses_of_two_models()
    for found in two_ranks.run(_several_losses_of_two_models):
        torch.testing.assert_close(found, alone)


def _max_norm(backend):
    model = nn.Sequential(nn.EmbeddingBag(9, 2, max_norm=0.5), nn.Linear(2, 1))
    with (
        Trainer(seed=0, devices="cpu", backend=backend, progress=False) as trainer,
        pytest.raises((ModelError, SelectionError)) as caught,
    ):
        trainer.prepare(model)
    return str(caught.value)


@pytest.mark.parametrize("backend", ["ddp", "fsdp"])
def test_an_embedding_that_scales_its_rows_is_refused(two_ranks, backend):
    for message in two_ranks.run(partial(_max_norm, backend)):
        assert "the model's '0' (EmbeddingBag) has max_norm=0.5" in message
        assert "torch.renorm(weight.data, 2, 0, 0.5)" in message


def _frozen_with_max_norm():
    model = nn.Sequential(nn.Embedding(9, 2, max_norm=0.5), nn.Linear(2, 1))
    model[0].requires_grad_(requires_grad=False)
    with Trainer(seed=0, devices="cpu", backend="ddp", progress=False) as trainer:
        return trainer.prepare(model) is not None


def test_one_that_is_not_trained_is_taken(two_ranks):
    assert two_ranks.run(_frozen_with_max_norm) == [True, True]


def _prepared_in_evaluation_mode(backend, devices):
    model = make_model().eval()
    with Trainer(seed=0, devices=devices, backend=backend, progress=False) as trainer:
        return trainer.prepare(model).training, model.training


def test_a_model_that_is_in_evaluation_mode_is_so_when_it_is_prepared(two_ranks):
    assert two_ranks.run(partial(_prepared_in_evaluation_mode, "ddp", "cpu")) == [(False, False)] * 2
    for backend in ("tuple", "dp-gather"):
        assert _prepared_in_evaluation_mode(backend, ["cpu", "cpu"]) == (False, False)


def beside_another_trainer():
    """Train with a second trainer while the first one is open, whose models it knows nothing of."""
    told = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logging.getLogger("tp_core").addHandler(handler)
    first = Trainer(seed=0, devices="cpu", backend="ddp", progress=False)
    for model in (make_model(), make_model()):
        first.fit(model, torch.optim.SGD(model.parameters(), lr=0.1), loader(), step=squared_error)
    del model  # the next one may get the identities of its parameters
    with Trainer(seed=0, devices="cpu", backend="ddp", progress=False) as second:
        for _ in range(5):
            model = make_model()
            second.fit(model, torch.optim.SGD(model.parameters(), lr=0.1), loader(), step=squared_error)
            del model
    first.close()
    return told


def test_two_trainers_that_are_open_know_each_others_optimizers(two_ranks):
    assert two_ranks.run(beside_another_trainer) == [[], []]


def converted(dtype):
    """Convert a model that fsdp has prepared; return its type, and what a step says then."""
    model, (batch,) = make_model(), loader().dataset[:4][:1]
    with Trainer(seed=0, devices="cpu", backend="fsdp", progress=False) as trainer:
        trainer.prepare(model)
        model.to(dtype)
        try:
            trainer.run(lambda m, b: m(b).mean(), model, batch.to(dtype))
        except StepError as error:
            return next(model.parameters()).dtype, str(error)
    return next(model.parameters()).dtype, None


def test_a_model_that_fsdp_has_prepared_is_converted_before(two_ranks):
    for found, message in two_ranks.run(converted, torch.float32):
        assert found is torch.float32
        assert message.startswith("the model was converted to another type after it was prepared: its shards")
    assert two_ranks.run(converted, torch.float64) == [(torch.float64, None)] * 2
