"""Parameters that torch's fully_shard cannot gather, and those that a forward pass writes."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils.data import DataLoader
from tp_core.errors import StepError
from tp_trainer import Checkpoints, Trainer

from tests.cases import first_fast
from tests.reference_training import rows_and_sums


class Block(nn.Module):
    """Has a scalar, as temperatures and gains of layers are, and one that is not trained."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.gain = nn.Parameter(torch.tensor(0.5))
        self.fixed = nn.Parameter(torch.tensor(2.0), requires_grad=False)

    def forward(self, x):
        return x + self.fixed * self.gain * torch.tanh(self.linear(x))


def make_model():
    torch.manual_seed(1)
    model = nn.Sequential(Block(), Block(), nn.Linear(3, 1))
    model.scale = nn.Parameter(torch.tensor(1.5))
    model.none = nn.Parameter(torch.empty(0, 3))
    return model.double()


def loader():
    return DataLoader(rows_and_sums(11), batch_size=4, shuffle=True)


def step(model, batch):
    return (model.scale * model(batch[0]) + model.none.sum() - batch[1]).square().mean()


def trained(backend, *, accumulate=1, folder=None, max_steps=None):
    model = make_model()
    with Trainer(seed=0, devices="cpu", backend=backend, accumulate=accumulate, progress=False) as trainer:
        trainer.fit(
            model,
            torch.optim.Adam(model.parameters(), lr=0.05),
            loader(),
            step=step,
            epochs=2,
            max_steps=max_steps,
            clip_norm=0.5,
            checkpoint=folder and Checkpoints(folder, every_steps=1),
            resume=folder and "auto",
        )
        whole = {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in model.named_parameters()}
        return {name: p.detach().clone() for name, p in whole.items()}


@pytest.mark.parametrize("accumulate", [1, 2])
def test_scalars_and_empty_parameters_train_as_on_one_device(two_ranks, accumulate):
    alone = trained("single", accumulate=accumulate)
    for found in two_ranks.run(partial(trained, "fsdp", accumulate=accumulate)):
        torch.testing.assert_close(found, alone)


@pytest.mark.slow
def test_they_are_resumed(two_ranks, tmp_path):
    alone = trained("single")
    two_ranks.run(partial(trained, "fsdp", folder=tmp_path, max_steps=4))
    for found in two_ranks.run(partial(trained, "fsdp", folder=tmp_path)):
        torch.testing.assert_close(found, alone)


class Writes(nn.Module):
    def __init__(self, write):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.write = write

    def forward(self, x):
        self.write(self.linear)
        return self.linear(x)


@torch.no_grad()
def in_place(linear):
    linear.weight.div_(linear.weight.norm())


def data_replaced(linear):
    linear.weight.data = torch.renorm(linear.weight.data, 2, 0, 0.1)


def data_written(linear):
    linear.weight.data.clamp_(-0.01, 0.01)


def data_written_late(linear):
    linear.calls = getattr(linear, "calls", 0) + 1
    if linear.calls > 2:
        linear.weight.data.clamp_(-0.01, 0.01)


def nothing(linear):
    linear.weight.data  # noqa: B018 - looked at


def _writing(write, *, in_a_unit):
    torch.manual_seed(1)
    parts = [Writes(write) for _ in range(2)] if in_a_unit else [Writes(write)]
    model = nn.Sequential(*parts, nn.Linear(3, 1)).double()
    plain = lambda model, batch: (model(batch[0]) - batch[1]).square().mean()  # noqa: E731 - short
    with Trainer(seed=0, devices="cpu", backend="fsdp", progress=False) as trainer:
        try:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            trainer.fit(model, optimizer, loader(), step=plain, epochs=4)
        except StepError as error:
            return str(error)
    return None


@pytest.mark.parametrize("in_a_unit", first_fast([False, True]))
def test_a_forward_pass_that_writes_weights_is_refused(two_ranks, in_a_unit):
    name = "'linear.weight' of the model's Writes" if in_a_unit else "'0.linear.weight' of the model's Seq"
    for write in (in_place, data_replaced, data_written, data_written_late):
        for message in two_ranks.run(partial(_writing, write, in_a_unit=in_a_unit)):
            assert message is not None, write
            assert f"the forward pass wrote the parameter {name}" in message
    assert two_ranks.run(partial(_writing, nothing, in_a_unit=in_a_unit)) == [None, None]


def _gathers_of_a_step(*, again):
    model = make_model()
    given = list(model.parameters())
    options = {"fsdp": {"reshard_after_forward": again}}
    with Trainer(seed=0, devices="cpu", backend="fsdp", options=options, progress=False) as trainer:
        model, optimizer = trainer.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
        with torch._C.DisableTorchFunctionSubclass():  # to look at them is refused
            kept = sum(p.numel() for p in given if p.dim() and p.requires_grad)
        for batch in trainer.prepare(loader()):
            optimizer.zero_grad()
            with CommDebugMode() as seen:
                trainer.backward(trainer.run(step, model, batch))
            optimizer.step()
        counts = seen.get_comm_counts()
        return kept, sum(n for kind, n in counts.items() if "allgather" in str(kind))


@pytest.mark.parametrize(("again", "gathers"), [(False, 3), (True, 3 + 2)])
def test_a_step_gathers_what_is_in_no_unit_once_and_prepared_weights_leave_no_whole_ones(
    two_ranks, again, gathers
):
    assert two_ranks.run(partial(_gathers_of_a_step, again=again)) == [(0, gathers)] * 2


def _updated_without_a_backward_pass(backend):
    model = make_model()
    with Trainer(seed=0, devices="cpu", backend=backend, progress=False) as trainer:
        model, optimizer = trainer.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for number, batch in enumerate(trainer.prepare(loader())):
            loss = trainer.run(step, model, batch)
            if number % 2:  # weights change after a forward pass that nothing goes back through
                optimizer.step()
                optimizer.zero_grad()
            else:
                trainer.backward(loss)
        optimizer.step()
        whole = {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in model.named_parameters()}
        return {name: p.detach().clone() for name, p in whole.items()}


def test_weights_that_change_after_a_lone_forward_pass_are_gathered_again(two_ranks):
    alone = _updated_without_a_backward_pass("single")
    for found in two_ranks.run(partial(_updated_without_a_backward_pass, "fsdp")):
        torch.testing.assert_close(found, alone)
