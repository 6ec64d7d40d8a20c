"""Joining the process group of a job, leaving it, and joining again."""

import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from tp_core import LaunchEnvironment
from tp_core.errors import ConfigError, LaunchEnvironmentError
from tp_core.sessions import (
    ProcessGroupSession,
    SessionWrapper,
    join_process_group,
    new_process_group,
    rendezvous_store,
)
from tp_testing import ConformanceKit, RankPool, make_job, run_ranks

from tests.accelerator import COLLECTIVES, GPU, KIND

ALONE = LaunchEnvironment.read({})
CPU = torch.device("cpu")


def test_one_process_without_a_launcher_is_a_group_of_one():
    leave = join_process_group(ALONE, device=CPU)
    assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
    leave()
    leave()
    assert not dist.is_initialized()


def test_a_group_that_the_script_has_joined_is_the_scripts_to_leave():
    leave_ours = join_process_group(ALONE, device=CPU)
    leave = join_process_group(ALONE, device=CPU)
    leave()
    assert dist.is_initialized()
    leave_ours()
    assert not dist.is_initialized()


def test_what_left_an_earlier_group_does_not_leave_a_later_one():
    leave_first = join_process_group(ALONE, device=CPU)
    dist.destroy_process_group()
    leave_second = join_process_group(ALONE, device=CPU)
    leave_first()
    assert dist.is_initialized()
    leave_second()


def test_several_processes_without_an_address_are_told_how_to_start():
    lost = LaunchEnvironment(rank=1, world_size=2)
    with pytest.raises(LaunchEnvironmentError, match="tp launch -n N"):
        join_process_group(lost, device=CPU)


@pytest.mark.parametrize("binds", [True, False])
def test_nccl_is_told_its_device_unless_that_is_declined(monkeypatch, binds):
    told = {}

    def note(*_, device_id=None, **__):
        told["device"] = device_id

    card = torch.device("cuda", 0)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda _: None)
    monkeypatch.setattr(dist, "init_process_group", note)
    monkeypatch.setattr(dist, "get_world_size", lambda _: 1)
    join_process_group(ALONE, device=card, bind_device=binds)
    assert told == {"device": card if binds else None}


@pytest.mark.gpu
@pytest.mark.skipif(KIND == "cuda", reason="it is of accelerators of other types")
def test_a_group_of_another_type_is_not_bound_as_torch_makes_none_of_gloo_beside_it():
    alone = {"rank": 0, "world_size": 1}
    dist.init_process_group(COLLECTIVES, store=dist.HashStore(), device_id=torch.device(GPU), **alone)
    try:
        with pytest.raises(RuntimeError, match="No backend type associated with device type"):
            dist.new_group(backend="gloo")
    finally:
        dist.destroy_process_group()
    leave = join_process_group(ALONE, device=torch.device(GPU))
    assert dist.get_backend(dist.new_group(backend="gloo")) == "gloo"
    leave()


def joined_again_and_again():
    sums = []
    for _ in range(3):
        leave = join_process_group(LaunchEnvironment.read(), device=CPU)
        with ProcessGroupSession(make_job(Kit()), leave=leave) as session:
            sums.append(session.reduce(torch.ones(1)).item())
        assert not dist.is_initialized()
    return sums


class Kit(ConformanceKit):
    class backend:  # noqa: N801 - the kit's attribute
        name = "none"
        self_test_options = {}


@pytest.mark.slow
def test_a_process_joins_again_after_it_has_left():
    assert run_ranks(joined_again_and_again, 2) == [[2.0] * 3] * 2


def shared_samples(per_sample):
    """Return where a rank stands, through a session around another, and sums of ranks' numbers."""
    job = replace(make_job(Kit()), ranks_per_sample=per_sample)
    leave = join_process_group(job.environment, device=CPU)
    try:
        inner = ProcessGroupSession(job, leave=leave)
    except ConfigError as error:
        assert not dist.is_initialized()
        return str(error)
    with SessionWrapper(inner) as session:
        own = torch.tensor([float(session.rank)])
        of_sample = own.clone()
        if session.sample_size > 1:
            dist.all_reduce(of_sample, group=session.sample_group)
        place = session.data_rank, session.data_size, session.sample_rank
        return place, session.reduce(own).item(), session.gather(own).tolist(), of_sample.item()


@pytest.mark.slow
def test_ranks_that_share_samples_are_neighbors_and_reduce_over_the_others():
    with RankPool(4) as ranks:
        assert ranks.run(shared_samples, 2) == [
            ((0, 2, 0), 2.0, [0.0, 2.0], 1.0),
            ((0, 2, 1), 4.0, [1.0, 3.0], 1.0),
            ((1, 2, 0), 2.0, [0.0, 2.0], 5.0),
            ((1, 2, 1), 4.0, [1.0, 3.0], 5.0),
        ]
        assert [place for place, *_ in ranks.run(shared_samples, -1)] == [(0, 1, rank) for rank in range(4)]
        said = ranks.run(shared_samples, 3)
        assert all("4 ranks, which hold the same weights, are not a multiple" in text for text in said)


def test_a_number_of_ranks_for_a_sample_is_from_one():
    with pytest.raises(ConfigError, match="ranks_per_sample must be -1 for all, or their number, got 0"):
        replace(make_job(Kit()), ranks_per_sample=0)


def knows_that_the_other_is_connected(key, name, form):
    environment = LaunchEnvironment.read()
    store = rendezvous_store(environment)
    if environment.rank == 1:
        original = getattr(dist, name)

        def slowly(*args, **kwargs):
            result = original(*args, **kwargs)
            time.sleep(0.3)
            store.set(key, b"")
            return result

        setattr(dist, name, slowly)
    form(environment)
    return store.check([key])


def joins(environment):
    join_process_group(environment, device=CPU)


def makes_a_group(environment):
    joins(environment)
    return new_process_group([0, 1], known_to_all=False)


@pytest.mark.parametrize(("name", "form"), [("init_process_group", joins), ("new_group", makes_a_group)])
def test_a_group_that_was_formed_may_be_left_at_once(name, form):
    assert run_ranks(knows_that_the_other_is_connected, 2, "connected", name, form) == [True, True]


def makes_groups_of_some():
    joins(LaunchEnvironment.read())
    groups = new_process_group([1]), new_process_group()
    return [None if group is None else dist.get_process_group_ranks(group) for group in groups]


def test_a_rank_that_is_no_member_gets_no_group():
    assert run_ranks(makes_groups_of_some, 2) == [[None, [0, 1]], [[1], [0, 1]]]
