"""Loops that the user writes: whose share a loss is weighed by, and what is gathered."""

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset
from tp_core.errors import DisagreementError, StepError
from tp_testing import run_ranks
from tp_trainer import Trainer

from tests.reference_training import squared_error


def data(n, first=0):
    x = torch.arange(float(first), first + n, dtype=torch.float64).reshape(n, 1)
    return TensorDataset(x, (x * 7) % 5)


def loader_of(n, batch_size, first=0, **options):
    return DataLoader(data(n, first), batch_size=batch_size, **options)


def make_model():
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.constant_(model.weight, 0.5)
    return model


def weighted_step(model, batch):
    """A mean over the targets above 1."""
    x, y = batch
    counted = y > 1
    return {"loss": ((model(x) - y).square() * counted).sum() / counted.sum(), "weight": counted.sum()}


def make_trainer(**arguments):
    return Trainer(seed=0, devices="cpu", progress=False, **arguments)


def on_one_and_two(body):
    """Return what ``body`` returns on one device, and make sure that it is the same on two ranks."""
    alone = body()
    for found in run_ranks(body, 2):
        assert found == pytest.approx(alone, rel=1e-9)
    return alone


# -- whose share -----------------------------------------------------------------------------------


def test_later_backward_passes_are_checked_and_weighed_as_the_first():
    with make_trainer() as trainer:
        model = trainer.prepare(make_model())
        rows = torch.ones(3, 1, dtype=torch.float64)
        for _ in range(3):
            with pytest.raises(StepError, match="shape"):
                trainer.backward(model(rows))
            model.zero_grad()
            trainer.backward(model(rows).mean())
            trainer.backward(model(rows).mean(), weight=3.0, total=6.0)
            trainer.backward({"loss": model(rows).mean(), "weight": 0.0})
            loss = model(rows).square().mean()
            trainer.backward(loss, retain_graph=True)
            trainer.backward(loss)
            assert next(model.parameters()).grad.item() == pytest.approx(1 + 0.5 + 2 * 1.0)


def _gradients(one_step, *, batch_size=4, n=11, with_run=True, **arguments):
    """Return the gradient of each batch, and its loss over all ranks."""
    with make_trainer(**arguments) as trainer:
        model, loader = trainer.prepare(make_model(), loader_of(n, batch_size))
        found = []
        for batch in loader:
            model.zero_grad()
            output = trainer.run(one_step, model, batch) if with_run else one_step(model, batch)
            trainer.backward(output)
            found += [next(model.parameters()).grad.item(), trainer.global_loss(output).item()]
        return found


def _sum_step(model, batch):
    return (model(batch[0]) - batch[1]).square().sum()


def _with_a_plain_loss():
    return (
        _gradients(squared_error)
        + _gradients(squared_error, with_run=False)
        + _gradients(_sum_step, loss="sum")
    )


def _with_a_weight():
    return _gradients(weighted_step) + _gradients(weighted_step, with_run=False)


@pytest.mark.slow
def test_a_loss_is_weighed_by_samples_or_by_the_weight_of_its_step():
    on_one_and_two(_with_a_plain_loss)
    on_one_and_two(_with_a_weight)


def _two_loaders():
    """One step for each pair of batches, of which the last ones lie differently on two ranks."""
    with make_trainer() as trainer:
        model, a, b = trainer.prepare(make_model(), loader_of(19, 8), loader_of(24, 8, 50))
        found = []
        for p, q in zip(a, b, strict=True):
            model.zero_grad()
            trainer.backward(trainer.run(squared_error, model, p))
            trainer.backward(squared_error(model, q), batch=q)
            trainer.backward(squared_error(model, p), batch=p)
            trainer.backward(squared_error(model, q), weight=len(q[0]), batch=q)
            found.append(next(model.parameters()).grad.item())
        return found


def test_a_loss_is_weighed_by_the_batch_that_it_is_of():
    on_one_and_two(_two_loaders)


def _two_loaders_without_a_word():
    with make_trainer() as trainer:
        model, a, b = trainer.prepare(make_model(), loader_of(19, 8), loader_of(24, 8, 50))
        for i, (p, _) in enumerate(zip(a, b, strict=True)):
            if i < 2:
                trainer.backward(squared_error(model, p))  # both lie alike
                continue
            with pytest.raises(StepError) as caught:
                trainer.backward(squared_error(model, p))
        return str(caught.value)


def test_a_loss_that_can_be_of_either_of_two_batches_is_refused(two_ranks):
    for message in two_ranks.run(_two_loaders_without_a_word):
        assert "it is not known which batch this is about" in message
        assert "trainer.backward(loss, batch=batch)" in message


def _batches_kept():
    with make_trainer() as trainer:
        model, loader = trainer.prepare(make_model(), loader_of(11, 4))
        batches = list(loader)
        for batch in batches:
            trainer.backward(trainer.run(squared_error, model, batch))
        for batch in batches:
            trainer.backward(squared_error(model, batch), batch=batch)
        return [next(model.parameters()).grad.item()]


def test_batches_may_be_kept_and_used_later():
    on_one_and_two(_batches_kept)


def _validates_between_two_batches():
    with make_trainer() as trainer:
        model, loader = trainer.prepare(make_model(), loader_of(11, 4))
        few = trainer.prepare(loader_of(5, 5), training=False)
        found = []
        for batch in loader:
            model.zero_grad()
            with torch.no_grad():
                for other in few:
                    trainer.run(squared_error, model, other)
            trainer.backward(squared_error(model, batch))
            found.append(next(model.parameters()).grad.item())
        return found


def test_a_validation_between_two_batches_disturbs_nothing():
    on_one_and_two(_validates_between_two_batches)


def _accumulated():
    """Count first, then add up: the gradient of the mean over both batches."""
    with make_trainer() as trainer:
        model, loader = trainer.prepare(make_model(), loader_of(11, 4))
        batches = list(loader)
        mine = sum(int((y > 1).sum()) for _, y in batches)
        total = trainer.session.reduce(torch.tensor(float(mine))).item()
        with trainer.no_sync(model):
            for batch in batches[:-1]:
                trainer.backward(trainer.run(weighted_step, model, batch), total=total)
        trainer.backward(trainer.run(weighted_step, model, batches[-1]), total=total)
        return [next(model.parameters()).grad.item()]


def test_batches_are_added_up_by_a_total_that_the_caller_knows():
    (found,) = on_one_and_two(_accumulated)
    model = make_model()
    weighted_step(model, data(11).tensors)["loss"].backward()
    assert found == pytest.approx(model.weight.grad.item())


def _foreign_batch():
    with make_trainer() as trainer:
        model, _ = trainer.prepare(make_model(), loader_of(11, 4))
        batch = data(4).tensors
        with pytest.raises(StepError) as caught:
            trainer.backward(squared_error(model, batch), batch=batch)
        return str(caught.value)


def test_a_batch_that_no_loader_has_yielded_has_no_share(two_ranks):
    for message in two_ranks.run(_foreign_batch):
        assert "has no tensor that a prepared loader has yielded" in message


def test_half_precision_scales_a_weighted_loss_too():
    with make_trainer(precision="fp16-mixed") as trainer:
        model, loader = trainer.prepare(make_model(), loader_of(4, 4))
        (batch,) = loader
        trainer.backward(trainer.run(weighted_step, model, batch))
        scaled = model.weight.grad.item()
    model = make_model()
    weighted_step(model, data(4).tensors)["loss"].backward()
    assert scaled == pytest.approx(65536 * model.weight.grad.item(), rel=1e-2)


def test_a_step_runs_in_the_trainers_precision():
    seen = []

    def noting(model, batch):
        seen.append(model(batch[0]).dtype)
        return squared_error(model, batch)

    with make_trainer(precision="bf16-true") as trainer:
        model, loader = trainer.prepare(make_model(), loader_of(4, 4))
        trainer.backward(trainer.run(noting, model, next(iter(loader))))
    assert seen == [torch.bfloat16]


# -- gathering -------------------------------------------------------------------------------------


def _gathered(n, batch_size, *, training):
    with make_trainer() as trainer:
        _, loader = trainer.prepare(make_model(), loader_of(n, batch_size), training=training)
        rows, met = [], 0
        for x, y in loader:
            met += len(x)
            found = trainer.gather_for_metrics({"x": x, "pair": (y, x[:, 0])})
            assert torch.equal(found["x"][:, 0], found["pair"][1])
            rows += found["x"].flatten().tolist()
        return rows, trainer.session.reduce(torch.tensor(met)).item(), len(loader)


CASES = [(17, 8), (17, 1), (5, 5), (3, 2), (16, 8)]


def _all_gathered():
    return [_gathered(*case, training=training) for case in CASES for training in (True, False)]


@pytest.mark.parametrize("ranks", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_each_sample_is_gathered_once_in_order(ranks):
    everywhere = run_ranks(_all_gathered, ranks) if ranks > 1 else [_all_gathered()]
    for outcomes in everywhere:
        for (n, _), training, evaluation in zip(CASES, outcomes[::2], outcomes[1::2], strict=True):
            assert training[0] == evaluation[0] == list(range(n))
            assert evaluation[1] == n


def _lengths():
    with make_trainer() as trainer:
        lengths = []
        for n, size in [*CASES, (7, 3)]:
            for drop_last in (True, False):
                if drop_last and n - n % size < trainer.world_size:
                    continue  # fewer samples than ranks
                loader = trainer.prepare(loader_of(n, size, drop_last=drop_last), training=False)
                lengths.append((len(loader), len(list(loader))))
        return lengths


def test_a_loader_for_evaluation_knows_its_length():
    for lengths in run_ranks(_lengths, 3):
        assert all(told == found for told, found in lengths)


def _gathered_at_the_end():
    """Rows are gathered once, after the loop; some batches have a sample for one rank alone."""
    with make_trainer() as trainer:
        sampler = BatchSampler(SequentialSampler(range(17)), 8, drop_last=False)
        own = DataLoader(data(17), batch_sampler=_Own(sampler))
        loader = trainer.prepare(own, training=False)
        rows = [x for x, _ in loader]
        found = trainer.gather_for_metrics(torch.cat(rows))
        training = trainer.prepare(loader_of(17, 8))
        rows = [x for x, _ in training]
        try:
            trainer.gather_for_metrics(torch.cat(rows))
        except StepError as error:
            return sorted(found.flatten().tolist()), str(error)
        return sorted(found.flatten().tolist()), ""


class _Own:
    """A sampler of batches that is not torch's: its batches are not joined."""

    def __init__(self, inner):
        self.inner = inner

    def __iter__(self):
        return iter(self.inner)

    def __len__(self):
        return len(self.inner)


def test_rows_may_be_gathered_once_unless_a_stand_in_is_among_them(two_ranks):
    assert _gathered_at_the_end() == (list(range(17)), "")
    for rows, message in two_ranks.run(_gathered_at_the_end):
        assert rows == list(range(17))
        assert "a rank met a stand-in for a sample in the last loop" in message


def _a_rank_that_does_not_come():
    with make_trainer() as trainer:
        sampler = BatchSampler(SequentialSampler(range(9)), 8, drop_last=False)
        loader = trainer.prepare(DataLoader(data(9), batch_sampler=_Own(sampler)), training=False)
        try:
            for x, _ in loader:
                trainer.gather_for_metrics(x)
        except StepError as error:
            return str(error)
        return ""


def test_gathering_what_a_rank_does_not_meet_is_refused_where_it_would_wait(two_ranks):
    first, second = two_ranks.run(_a_rank_that_does_not_come)
    assert "the batch has 1 samples for 2 ranks" in first
    assert second == ""


def _different_shapes():
    with make_trainer() as trainer:
        rank = trainer.prepare(make_model()) is not None and trainer.rank
        with pytest.raises(DisagreementError) as caught:
            trainer.gather_for_metrics(torch.zeros(3, 4 + rank))
        return str(caught.value)


def test_ranks_whose_rows_differ_in_shape_are_told(two_ranks):
    for message in two_ranks.run(_different_shapes):
        assert "ranks disagree on what is gathered" in message
        assert "(4,)" in message
        assert "(5,)" in message


def test_only_tensors_are_gathered():
    with (
        make_trainer() as trainer,
        pytest.raises(StepError, match=r"what is gathered must be tensors .* got str"),
    ):
        trainer.gather_for_metrics({"names": ["a"]})


# -- epochs ----------------------------------------------------------------------------------------


def _orders(*, epochs, calls, prepared=False, evaluates=False, checkpoint=None):
    """Return the samples of each epoch that this rank met in training, and the model's weight."""
    met = []

    def noting(model, batch):
        if model.training:
            met.append(batch[0].flatten().tolist())
        return squared_error(model, batch) * 1e-3

    model = make_model()
    with make_trainer() as trainer:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = loader_of(10, 4, shuffle=True)
        given = trainer.prepare(loader) if prepared else loader
        for call in range(calls):
            few = loader_of(5, 2, shuffle=True)
            more = {} if checkpoint is None else {"checkpoint": f"{checkpoint}/{call}"}
            trainer.fit(model, optimizer, given, step=noting, epochs=epochs, validation=few, **more)
            if evaluates:
                trainer.evaluate(model, given, step=noting)
        return met, model.weight.item()


def _repeated():
    whole = _orders(epochs=3, calls=1)
    assert _orders(epochs=1, calls=3) == whole
    assert _orders(epochs=1, calls=3, prepared=True, evaluates=True) == whole
    first, second, third = whole[0][:3], whole[0][3:6], whole[0][6:]
    return first != second != third


def test_fit_again_and_again_goes_on_with_the_next_epochs_order(two_ranks):
    assert _repeated()
    assert all(two_ranks.run(_repeated))


def test_a_second_fit_is_resumed_exactly(tmp_path):
    class StoppedError(Exception):
        pass

    def run(calls, *, stop=None, resume=False):
        count = 0
        met = []

        def noting(model, batch):
            nonlocal count
            if model.training:
                count += 1
                if count == stop:
                    raise StoppedError
            met.append(batch[0].flatten().tolist())
            return squared_error(model, batch) * 1e-3

        model = make_model()
        with make_trainer() as trainer:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            loader = loader_of(10, 4, shuffle=True)
            for call in calls:
                few = loader_of(5, 2, shuffle=True)
                more = {"checkpoint": tmp_path / str(call)} if stop or resume else {}
                if resume:
                    more["resume"] = "auto"
                trainer.fit(model, optimizer, loader, step=noting, epochs=2, validation=few, **more)
        return met, model.weight.item()

    whole, weight = run([0, 1])
    with pytest.raises(StoppedError):
        run([0, 1], stop=11)  # in the second epoch of the second call
    rest, resumed = run([1], resume=True)
    assert resumed == weight
    assert rest == whole[-len(rest) :]
    assert len(rest) == 3 + 3
