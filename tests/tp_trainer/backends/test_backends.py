"""The two backends that tp-trainer brings do what every backend must do."""

from functools import partial

import pytest
import torch
from torch import nn
from tp_core import LaunchEnvironment, resolve_devices
from tp_core.errors import ConfigError, DisagreementError, StepError
from tp_core.plugins import Job
from tp_testing import BackendConformance, TrainingConformance, make_job, run_ranks
from tp_trainer import DdpOptions

from tests.installed import backend_class

DdpBackend = backend_class("ddp")
SingleBackend = backend_class("single")


class TestSingle(BackendConformance):
    backend = SingleBackend


class TestDdp(BackendConformance):
    backend = DdpBackend
    processes = 2
    unused_options = {"find_unused_parameters": True}


@pytest.mark.nightly
class TestDdpWithThreeRanks(BackendConformance):
    """More ranks than the last batch has samples, and batches that none divides."""

    backend = DdpBackend
    processes = 3
    options = {"find_unused_parameters": True, "bucket_cap_mb": 1}


@pytest.mark.slow
class TestTrainingOnSingle(TrainingConformance):
    backend = SingleBackend


@pytest.mark.slow
class TestTrainingOnDdp(TrainingConformance):
    backend = DdpBackend
    processes = 2


def job(devices="cpu", *, model=None, explicit=True, **environ):
    return Job(
        devices=resolve_devices(devices),
        environment=LaunchEnvironment.read(environ),
        explicit_devices=explicit,
        model=model,
    )


LAUNCHED = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "0",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "1",
}


def test_several_devices_that_were_asked_for_do_not_fit_a_single_one():
    verdict = SingleBackend().assess(job(2))
    assert not verdict.is_fit
    assert "2 devices in one process" in verdict.reason
    assert "tp launch -n 2 script.py (pip install tp-launch), or pip install tp-tuple" in verdict.remedy


def test_several_devices_that_happen_to_be_there_are_used_in_part_and_it_says_so():
    verdict = SingleBackend().assess(job(2, explicit=False))
    assert verdict.score == 10
    assert "alone of 2 devices" in verdict.reason
    assert "pip install tp-tuple" in verdict.remedy


def test_several_processes_fit_ddp_and_not_single():
    assert DdpBackend().assess(job(**LAUNCHED)).is_fit
    assert "launched as 2 processes" in SingleBackend().assess(job(**LAUNCHED)).reason


def test_one_process_does_not_fit_ddp():
    verdict = DdpBackend().assess(job())
    assert not verdict.is_fit
    assert verdict.remedy == "tp launch -n 2 script.py (pip install tp-launch)"


def test_two_devices_in_each_process_do_not_fit_ddp():
    assert "2 devices in each process" in DdpBackend().assess(job(2, **LAUNCHED)).reason


def test_sharded_parameters_do_not_fit_ddp():
    model = nn.Linear(2, 2)
    model.weight.tp_sharded = True
    verdict = DdpBackend().assess(job(model=model, **LAUNCHED))
    assert "sharded parameters" in verdict.reason
    assert verdict.remedy == "pip install tp-shard"


def test_sync_batchnorm_without_an_accelerator_is_refused():
    backend, options = DdpBackend(), {"ddp": {"sync_batchnorm": True}}
    here = Job(devices=resolve_devices("cpu"), environment=LaunchEnvironment.read({}), options=options)
    with pytest.raises(ConfigError, match="sync_batchnorm=True needs an accelerator"):
        backend.open(here)


def test_options_reach_ddp():
    options = {"ddp": {"timeout_s": 5.0, "find_unused_parameters": True}}
    made = DdpBackend().parse_options(
        Job(devices=resolve_devices("cpu"), environment=LaunchEnvironment.read({}), options=options)
    )
    assert made == DdpOptions(timeout_s=5.0, find_unused_parameters=True)


def _no_sync_with_a_static_graph():
    kit, options = TestDdp(), {"ddp": {"static_graph": True}}
    model = nn.Linear(3, 2)
    with DdpBackend().open(make_job(kit, model=model, options=options)) as session:
        prepared = session.prepare_model(model)
        with pytest.raises(ConfigError) as caught:
            session.no_sync(prepared)
    return str(caught.value)


def test_a_static_graph_cannot_accumulate(two_ranks):
    for message in two_ranks.run(_no_sync_with_a_static_graph):
        assert "static_graph=True does not go with no_sync()" in message


class Branches(nn.Module):
    """Uses one of its branches, or both."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(1, 1), nn.Linear(1, 1)

    def forward(self, x, *, both):
        return self.a(x) + self.b(x) if both else self.a(x)


def _branches(uses, *, options=None):
    """Make steps that use both branches or not, by rank; return the message of a refusal, or the weights."""
    torch.manual_seed(0)
    named = {} if options is None else {"ddp": options}
    plain = Branches()
    with DdpBackend().open(make_job(TestDdp(), model=plain, options=named)) as session:
        model = session.prepare_model(plain)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.full((2, 1), float(1 + session.rank))
        for step in uses:
            optimizer.zero_grad()
            session.backward(model(x, both=step[session.rank]).square().mean())
            before = [p.detach().clone() for p in model.parameters()]
            try:
                optimizer.step()
            except StepError as error:
                same = all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
                return str(error), same
        return [p.item() for p in model.parameters()]


def test_a_parameter_without_a_gradient_is_an_error_before_the_optimizer_steps(two_ranks):
    never, last = [(False, False)], [(True, True), (True, True), (False, False)]
    for uses in (never, last):
        for rank, (message, is_untouched) in enumerate(two_ranks.run(partial(_branches, uses))):
            assert f"the loss on rank {rank} came without 'b.weight', 'b.bias' of the model's 4" in message
            assert "find_unused_parameters=True" in message
            assert is_untouched


def _two_passes():
    """Make two forward and backward passes in one step, each through a part of the model."""
    plain = Branches()
    with DdpBackend().open(make_job(TestDdp(), model=plain)) as session:
        model, x = session.prepare_model(plain), torch.ones(2, 1)
        session.backward(model(x, both=False).sum())
        with pytest.raises(StepError) as caught:
            model(x, both=True)
    return str(caught.value)


@pytest.mark.slow
def test_a_second_pass_after_one_without_all_gradients_names_what_was_left_out():
    for rank, message in enumerate(run_ranks(_two_passes, 2)):
        assert f"the loss on rank {rank} came without 'b.weight', 'b.bias' of the model's 4" in message
        assert "find_unused_parameters=True" in message


def _thawed():
    plain = Branches()
    plain.b.requires_grad_(requires_grad=False)
    with DdpBackend().open(make_job(TestDdp(), model=plain)) as session:
        model = session.prepare_model(plain)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        plain.b.requires_grad_()
        session.backward(model(torch.ones(2, 1), both=True).square().mean())
        with pytest.raises(StepError) as caught:
            optimizer.step()
    return str(caught.value)


def test_a_parameter_that_is_trained_only_since_then_is_an_error(two_ranks):
    for message in two_ranks.run(_thawed):
        assert message.startswith("'b.weight', 'b.bias' of the model were frozen when it was prepared")


def _frozen(options):
    """Freeze the first layer after a step; return the message of a refusal, or the weights."""
    torch.manual_seed(0)
    plain = Branches()
    with DdpBackend().open(make_job(TestDdp(), model=plain, options={"ddp": options})) as session:
        model = session.prepare_model(plain)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number in range(3):
            optimizer.zero_grad()
            if number:
                plain.a.requires_grad_(requires_grad=False)
            session.backward(model(torch.full((2, 1), 1.0 + session.rank), both=True).square().mean())
            try:
                optimizer.step()
            except StepError as error:
                return str(error)
        return [p.item() for p in plain.parameters()]


def test_a_parameter_that_is_frozen_since_then_is_named(two_ranks):
    for message in two_ranks.run(_frozen, {}):
        assert message.startswith("'a.weight', 'a.bias' of the model were trained when it was prepared")
        assert "are frozen now" in message
    first, second = two_ranks.run(_frozen, {"find_unused_parameters": True})
    assert first == second


def test_steps_may_differ_in_what_they_use_where_that_was_said(two_ranks):
    uses = [(True, True), (False, True), (False, False)]
    body = partial(_branches, uses, options={"find_unused_parameters": True})
    first, second = two_ranks.run(body)
    assert first == second


def _hooks_of_optimizers():
    from torch.optim.optimizer import _global_optimizer_pre_hooks as hooks

    before = len(hooks)
    _branches([(True, True)])
    return len(hooks) - before


def test_optimizers_are_left_alone_when_the_session_is_closed(two_ranks):
    assert two_ranks.run(_hooks_of_optimizers) == [0, 0]


def _different_models():
    model = nn.Linear(3, 2 + LaunchEnvironment.read().rank)
    with (
        DdpBackend().open(make_job(TestDdp(), model=model)) as session,
        pytest.raises(DisagreementError) as caught,
    ):
        session.prepare_model(model)
    return str(caught.value)


def test_ranks_whose_models_differ_are_told_on_every_rank(two_ranks):
    for message in two_ranks.run(_different_models):
        assert "rank 0 has weight: (2, 3)" in message
        assert "rank 1 has weight: (3, 3)" in message


def _different_weights():
    torch.manual_seed(LaunchEnvironment.read().rank)
    model = nn.Linear(3, 2)
    with DdpBackend().open(make_job(TestDdp(), model=model)) as session:
        prepared = session.prepare_model(model)
        return session.unwrap(prepared).weight.tolist()


def test_ranks_whose_weights_differ_start_from_those_of_rank_0(two_ranks):
    first, second = two_ranks.run(_different_weights)
    assert first == second


def _batch_norm_after_training():
    rank = LaunchEnvironment.read().rank
    model = nn.BatchNorm1d(2)
    with DdpBackend().open(make_job(TestDdp(), model=model)) as session:
        prepared = session.prepare_model(model)
        prepared(torch.full((4, 2), float(rank)) + torch.arange(4.0)[:, None])
        session.sync_buffers(prepared)
        return model.running_mean.tolist()


def test_ranks_evaluate_with_the_statistics_of_rank_0(two_ranks):
    first, second = two_ranks.run(_batch_norm_after_training)
    assert first == second


def _second_session():
    kit = TestDdp()
    values = []
    for _ in range(2):
        with DdpBackend().open(make_job(kit)) as session:
            values.append(session.reduce(torch.ones(1)).item())
    return values


def test_a_session_can_follow_another_one(two_ranks):
    assert two_ranks.run(_second_session) == [[2.0, 2.0]] * 2


def _frozen_model():
    model = nn.Linear(3, 2).requires_grad_(requires_grad=False)
    with DdpBackend().open(make_job(TestDdp(), model=model)) as session:
        return session.prepare_model(model) is model


def test_a_model_without_anything_to_train_is_not_wrapped(two_ranks):
    assert two_ranks.run(_frozen_model) == [True, True]


def _uneven_gather():
    with DdpBackend().open(make_job(TestDdp())) as session:
        mine = torch.full((session.rank + 1, 2), float(session.rank))
        reduced = [
            session.reduce(torch.tensor(session.rank + 1.0), op).item() for op in ("mean", "min", "max")
        ]
        return session.gather(mine).tolist(), reduced


def test_gather_takes_uneven_lengths_and_reduce_every_operation(two_ranks):
    for gathered, reduced in two_ranks.run(_uneven_gather):
        assert gathered == [[0.0, 0.0], [1.0, 1.0], [1.0, 1.0]]
        assert reduced == [1.5, 1.0, 2.0]
