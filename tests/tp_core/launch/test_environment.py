"""What launched a process is read from its variables, and half of them are refused."""

import os
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tp_core import LaunchEnvironment
from tp_core.errors import LaunchEnvironmentError

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "host0",
    "MASTER_PORT": "29500",
}
SLURM = {
    "SLURM_JOB_ID": "1234",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "4",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "2",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_STEP_NODELIST": "node[007-008],gpu1",
}


def without(variables: dict[str, str], *names: str) -> dict[str, str]:
    return {k: v for k, v in variables.items() if k not in names}


@pytest.mark.parametrize(
    "environ",
    [{}, {"MASTER_ADDR": "host0"}, {"MASTER_PORT": "x"}, {"LOCAL_WORLD_SIZE": "2"}],
)
def test_a_process_without_launcher_is_plain(environ: dict[str, str]) -> None:
    env = LaunchEnvironment.read(environ)
    assert env == LaunchEnvironment()
    assert (env.launcher, env.rank, env.world_size, env.hosts) == ("plain", 0, 1, 1)
    assert not env.is_distributed
    assert env.is_main


def test_the_variables_of_this_process_are_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert LaunchEnvironment.read().rank == 3


def test_torchruns_variables_are_read() -> None:
    env = LaunchEnvironment.read(TORCHRUN)
    assert env == LaunchEnvironment(
        launcher="torchrun",
        rank=3,
        world_size=4,
        local_rank=1,
        local_world_size=2,
        host_rank=1,
        hosts=2,
        master_address="host0",
        master_port=29500,
    )
    assert env.is_distributed
    assert not env.is_main


@given(hosts=st.integers(1, 5), per_host=st.integers(1, 5), data=st.data())
def test_every_rank_of_an_even_job_is_read_back(hosts: int, per_host: int, data: Any) -> None:
    host = data.draw(st.integers(0, hosts - 1))
    local = data.draw(st.integers(0, per_host - 1))
    environ = {
        "RANK": str(host * per_host + local),
        "WORLD_SIZE": str(hosts * per_host),
        "LOCAL_RANK": str(local),
        "LOCAL_WORLD_SIZE": str(per_host),
        "GROUP_RANK": str(host),
        "MASTER_ADDR": "h",
        "MASTER_PORT": "1",
    }
    env = LaunchEnvironment.read(environ)
    assert (env.rank, env.local_rank, env.host_rank, env.hosts) == (
        host * per_host + local,
        local,
        host,
        hosts,
    )


def test_one_process_needs_neither_group_nor_meeting_point() -> None:
    env = LaunchEnvironment.read({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"})
    assert (env.launcher, env.local_world_size, env.hosts) == ("torchrun", 1, 1)
    assert (env.master_address, env.master_port) == (None, None)


def test_the_host_follows_from_all_processes_being_on_one() -> None:
    environ = without(TORCHRUN, "GROUP_RANK", "GROUP_WORLD_SIZE") | {"WORLD_SIZE": "2", "RANK": "1"}
    env = LaunchEnvironment.read(environ)
    assert (env.host_rank, env.hosts) == (0, 1)


@pytest.mark.parametrize(
    "name",
    ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR",
     "MASTER_PORT"],
)  # fmt: skip
def test_a_missing_variable_is_named_with_what_was_found_and_what_to_do(name: str) -> None:
    message = rf"^{name} is not set; found .*; start the script with `tp launch -n N .*`unset "
    with pytest.raises(LaunchEnvironmentError, match=message) as caught:
        LaunchEnvironment.read(without(TORCHRUN, name))
    assert "MASTER" not in str(caught.value).partition("unset")[2]


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK"])
def test_one_stray_variable_is_half_an_environment(name: str) -> None:
    with pytest.raises(LaunchEnvironmentError, match=rf"is not set; found {name}='0'; .*`unset"):
        LaunchEnvironment.read({name: "0"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"RANK": "one"}, "RANK='one' is not a whole number of at least 0"),
        ({"RANK": "-1"}, "RANK='-1' is not a whole number"),
        ({"RANK": ""}, "RANK is empty"),
        ({"RANK": "4"}, r"RANK \(4\) must be less than WORLD_SIZE \(4\)"),
        ({"LOCAL_RANK": "2"}, r"LOCAL_RANK \(2\) must be less than LOCAL_WORLD_SIZE \(2\)"),
        ({"GROUP_RANK": "2"}, r"the number of this host \(2\) must be less than .*hosts \(2\)"),
        ({"WORLD_SIZE": "0"}, r"RANK \(3\) must be less than WORLD_SIZE \(0\)"),
        ({"LOCAL_WORLD_SIZE": "0"}, r"LOCAL_RANK \(1\) must be less than LOCAL_WORLD_SIZE \(0\)"),
        ({"LOCAL_WORLD_SIZE": "5"}, r"LOCAL_WORLD_SIZE \(5\) must not be more than WORLD_SIZE"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT=0 is not a port; it must be from 1 to 65535"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT=70000 is not a port"),
    ],
)
def test_a_value_that_makes_no_sense_is_refused(change: dict[str, str], message: str) -> None:
    with pytest.raises(LaunchEnvironmentError, match=message):
        LaunchEnvironment.read(TORCHRUN | change)


def test_a_task_of_srun_is_read() -> None:
    env = LaunchEnvironment.read(SLURM)
    assert env == LaunchEnvironment(
        launcher="slurm",
        rank=4,
        world_size=5,
        local_rank=0,
        local_world_size=1,
        host_rank=2,
        hosts=3,
        master_address="node007",
        master_port=env.master_port,
    )
    assert env.master_port is not None
    assert 1024 < env.master_port < 32_768


def test_all_tasks_of_a_step_meet_at_one_place_and_steps_at_different_ones() -> None:
    env = LaunchEnvironment.read(SLURM)
    first = LaunchEnvironment.read(SLURM | {"SLURM_PROCID": "0", "SLURM_NODEID": "0"})
    other = LaunchEnvironment.read(SLURM | {"SLURM_STEP_ID": "1"})
    assert first.local_world_size == 2
    assert (env.master_address, env.master_port) == (first.master_address, first.master_port)
    assert env.master_port != other.master_port


def test_master_variables_win_over_what_slurm_implies() -> None:
    env = LaunchEnvironment.read(SLURM | {"MASTER_ADDR": "here", "MASTER_PORT": "7000"})
    assert (env.master_address, env.master_port) == ("here", 7000)


@pytest.mark.parametrize("step", [None, "4294967290", "4294967291", "4294967292", "batch", ""])
def test_scripts_of_sbatch_and_shells_of_salloc_are_plain(step: str | None) -> None:
    environ = without(SLURM, "SLURM_STEP_ID")
    environ |= {} if step is None else {"SLURM_STEP_ID": step}
    assert LaunchEnvironment.read(environ).launcher == "plain"


def test_torchruns_variables_win_over_slurms() -> None:
    assert LaunchEnvironment.read(SLURM | TORCHRUN) == LaunchEnvironment.read(TORCHRUN)


def test_one_task_of_srun_needs_little() -> None:
    environ = {"SLURM_STEP_ID": "3", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}
    env = LaunchEnvironment.read(environ)
    assert (env.launcher, env.world_size, env.master_address) == ("slurm", 1, None)


def test_the_tasks_of_one_node_need_no_list() -> None:
    environ = without(SLURM, "SLURM_STEP_TASKS_PER_NODE")
    environ |= {"SLURM_STEP_NUM_NODES": "1", "SLURM_NODEID": "0", "SLURM_LOCALID": "4"}
    assert LaunchEnvironment.read(environ).local_world_size == 5


@pytest.mark.parametrize(
    "name",
    ["SLURM_JOB_ID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_NUM_TASKS",
     "SLURM_STEP_NUM_NODES", "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NODELIST"],
)  # fmt: skip
def test_a_missing_variable_of_slurm_is_named(name: str) -> None:
    with pytest.raises(LaunchEnvironmentError, match=rf"^{name} is not set; found .*with srun"):
        LaunchEnvironment.read(without(SLURM, name))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"SLURM_PROCID": "5"}, r"SLURM_PROCID \(5\) must be less than SLURM_STEP_NUM_TASKS"),
        ({"SLURM_LOCALID": "1"}, r"SLURM_LOCALID \(1\) must be less than the number of tasks"),
        ({"SLURM_NODEID": "3"}, "TASKS_PER_NODE lists 3 nodes, this is the one with .*NODEID=3"),
        ({"SLURM_STEP_TASKS_PER_NODE": "two"}, "'two' is not a list of tasks per node"),
        ({"SLURM_STEP_NODELIST": "node[1"}, r"'node\[1' is not a list of hosts"),
    ],
)
def test_a_value_of_slurm_that_makes_no_sense_is_refused(change: dict[str, str], message: str) -> None:
    with pytest.raises(LaunchEnvironmentError, match=message):
        LaunchEnvironment.read(SLURM | change)


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ("node1", "node1"),
        ("node[001-004,7],gpu1", "node001"),
        ("a,b", "a"),
        ("n[9-11]", "n9"),
        ("r[3-4]n[1-2]", "r3n1"),
        ("n[1-2].cluster,x-y", "n1.cluster"),
        ("0[08-10]", "008"),
    ],
)
def test_the_first_of_slurms_hosts_is_the_meeting_point(text: str, first: str) -> None:
    assert LaunchEnvironment.read(SLURM | {"SLURM_STEP_NODELIST": text}).master_address == first


@pytest.mark.parametrize("text", ["n[1", "n]", "n[2-1]", "n[]", "n[a-b]", "a,,b", "n[[1]]"])
def test_a_malformed_host_list_is_refused(text: str) -> None:
    with pytest.raises(LaunchEnvironmentError, match=r"is not a list of hosts; it should look like"):
        LaunchEnvironment.read(SLURM | {"SLURM_STEP_NODELIST": text})


@given(st.lists(st.integers(1, 12), min_size=1, max_size=6))
def test_each_node_has_its_count_of_tasks(counts: list[int]) -> None:
    for text in (",".join(map(str, counts)), ",".join(f"{n}(x{n})" for n in counts)):
        found = [n for n in counts for _ in range(n if "x" in text else 1)]
        environ = SLURM | {"SLURM_STEP_TASKS_PER_NODE": text, "SLURM_STEP_NUM_NODES": str(len(found))}
        for node, count in enumerate(found):
            here = {"SLURM_NODEID": str(node), "SLURM_STEP_NUM_TASKS": str(sum(found)), "SLURM_PROCID": "0"}
            assert LaunchEnvironment.read(environ | here).local_world_size == count


@pytest.mark.parametrize("text", ["2(x)", "x3", "2(3)", "1,"])
def test_a_malformed_count_is_refused(text: str) -> None:
    with pytest.raises(LaunchEnvironmentError, match=r"is not a list of tasks per node; it should"):
        LaunchEnvironment.read(SLURM | {"SLURM_STEP_TASKS_PER_NODE": text})


@given(st.integers(0, 10**9), st.integers(0, 10**4))
def test_a_derived_port_is_neither_privileged_nor_ephemeral(job: int, step: int) -> None:
    def port(job: int, step: int) -> int | None:
        return LaunchEnvironment.read(
            SLURM | {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)}
        ).master_port

    found = port(job, step)
    assert found is not None
    assert 1024 < found < 32_768
    assert found not in (port(job, step + 1), port(job + 1, step))


def test_cores_are_those_that_this_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5, 7}, raising=False)
    assert LaunchEnvironment.read({}).cores == 3
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert LaunchEnvironment.read({}).cores == 1


def test_it_describes_itself_in_one_line() -> None:
    env = replace(LaunchEnvironment.read(TORCHRUN), cores=8)
    assert env.describe() == (
        "rank 3 of 4, local rank 1 of 2, host 1 of 2, started by torchrun, meeting at host0:29500, 8 cores"
    )
    assert LaunchEnvironment(cores=1).describe() == ("one process, started without a launcher, 1 core")
