"""What cannot work is refused before anything starts."""

import socket
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import typer
from tp_core.errors import ConfigError
from tp_launch import execute
from tp_launch._command import launch_app
from tp_launch._launch_plan import (  # what a host would do that has other addresses, or no network
    Endpoint,
    LaunchRequest,
    address_towards,
    interface_of,
    make_plan,
    own_address,
    parse_endpoint,
    parse_rdzv_conf,
)

from tests.run_tp import run


@pytest.fixture(autouse=True)
def _in_a_directory_with_a_script(tmp_path, monkeypatch):
    (tmp_path / "s.py").write_text("open('ran', 'w')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"script": "nope.py"}, r"no script 'nope.py' in .*; give the path"),
        ({"script": "."}, "'.' is a folder without a __main__.py; give the path of a Python file"),
        ({"script": "no_such.mod", "module": True}, "no module 'no_such.mod'"),
        ({"nproc_per_node": 0}, "-n/--nproc-per-node must be 1 or more .* got 0"),
        ({"nproc_per_node": "many"}, "got 'many'"),
        ({"nnodes": "two"}, "--nnodes must be a number or MIN:MAX.* got 'two'"),
        ({"nnodes": "3:2"}, "MIN not above MAX; got '3:2'"),
        ({"nnodes": "0"}, "at least 1"),
        ({"nnodes": "2"}, "needs an address where the hosts meet.*--rdzv-endpoint"),
        ({"nnodes": "2", "rdzv_endpoint": "h:0"}, "need a port that all of them know; got h:0"),
        ({"nnodes": "2", "rdzv_endpoint": "h:x"}, "must look like host:port .* got 'h:x'"),
        ({"nnodes": "2", "rdzv_endpoint": "h:70000"}, "a port up to 65535"),
        ({"nnodes": "2", "master_addr": "h"}, "needs --node-rank on each, from 0 to 1"),
        ({"nnodes": "2", "node_rank": 0}, "give --master-addr"),
        ({"nnodes": "2", "node_rank": 2, "master_addr": "h"}, "from 0 to 1 .* got 2"),
        ({"nnodes": "1:2", "node_rank": 0, "master_addr": "h"}, "fixed number of hosts; got"),
        ({"node_rank": 0, "rdzv_backend": "c10d"}, "belong to the static rendezvous"),
        ({"rdzv_endpoint": "h:1", "rdzv_conf": {"is_host": "maybe"}}, "0 or 1; got 'maybe'"),
        (
            {"rdzv_endpoint": "198.51.100.1:1"},
            "198.51.100.1:1 is not an address of this host, and --nnodes is",
        ),
        ({"bind_addr": "198.51.100.1"}, "--bind-addr must be an address of this host, .* got '198.51.100.1'"),
        ({"log_dir": "s.py"}, "must be a directory; 's.py' is a file"),
        ({"max_restarts": -1}, "--max-restarts must be 0 or more, got -1"),
        ({"monitor_interval_s": 0.0}, "--monitor-interval must be above 0 seconds, got 0.0"),
        ({"grace_s": -1.0}, "--grace-s must be 0 seconds or more, got -1.0"),
        ({"node_rank": -1}, "--node-rank must be 0 or more, got -1"),
    ],
)
def test_a_wrong_option_is_named_with_what_was_given(options, message):
    with pytest.raises(ConfigError, match=message):
        make_plan(LaunchRequest(**{"script": "s.py", "nproc_per_node": 1, **options}))


def test_the_command_says_it_in_a_line_and_exits_with_2(tmp_path, capfd):
    said = "tp launch: -n/--nproc-per-node must be 1 or more processes, or 'auto'; got '0'\n"
    assert run(["launch", "-n", "0", "s.py"]) == 2
    assert capfd.readouterr() == ("", said)
    assert run(["launch", "--bogus", "1", "s.py"]) == 2
    assert not (tmp_path / "ran").exists()


def test_an_option_that_is_not_given_is_that_of_torchruns_variable(monkeypatch, capfd):
    monkeypatch.setenv("PET_NNODES", "none")  # as an operator of a cluster sets it in each container
    assert run(["launch", "s.py"]) == 2
    said = capfd.readouterr().err
    assert "--nnodes must be a number or MIN:MAX" in said
    assert "got 'none'" in said


def test_rdzv_conf_is_read():
    assert parse_rdzv_conf(" a=1, b=c=d ") == {"a": "1", "b": "c=d"}
    with pytest.raises(ConfigError, match=r"key=value.* got 'a'"):
        parse_rdzv_conf("a")


def test_a_single_host_needs_nothing():
    plan = make_plan(LaunchRequest(script="s.py", nproc_per_node=2))
    assert (str(plan.endpoint), plan.is_host, plan.local_addr) == ("127.0.0.1:0", True, "127.0.0.1")


@pytest.mark.parametrize(
    ("options", "port"),
    [
        ({}, 0),
        ({"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0"}, 0),
        ({"rdzv_backend": "c10d", "rdzv_conf": {"store_type": "file"}}, 0),
        ({"node_rank": 0, "master_port": 1234}, 1234),
    ],
)
def test_a_single_host_meets_itself_where_no_other_one_can(options, port, monkeypatch):
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    plan = make_plan(LaunchRequest(script="s.py", nproc_per_node=2, **options))
    assert (plan.backend, plan.bind, plan.endpoint) == ("static", "127.0.0.1", Endpoint("127.0.0.1", port))
    loopback = interface_of("127.0.0.1")
    assert plan.env["GLOO_SOCKET_IFNAME"] == plan.env["NCCL_SOCKET_IFNAME"] == loopback
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    assert "GLOO_SOCKET_IFNAME" not in make_plan(LaunchRequest(script="s.py", nproc_per_node=2)).env


def test_cores_are_shared_out_unless_the_user_has(monkeypatch):
    assert "OMP_NUM_THREADS" in make_plan(LaunchRequest(script="s.py", nproc_per_node=2)).env
    assert "OMP_NUM_THREADS" not in make_plan(LaunchRequest(script="s.py", nproc_per_node=1)).env
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert "OMP_NUM_THREADS" not in make_plan(LaunchRequest(script="s.py", nproc_per_node=2)).env


def test_the_rendezvous_host_is_known_by_its_interfaces(monkeypatch):
    entry = SimpleNamespace(family=socket.AF_INET, address="198.51.100.7")
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"veth7": [entry]})
    here = LaunchRequest(script="s.py", nproc_per_node=1, nnodes="2", rdzv_endpoint="198.51.100.7:1234")
    plan = make_plan(here)
    assert (plan.is_host, plan.may_follow, plan.local_addr) == (True, True, "198.51.100.7")
    assert plan.env["GLOO_SOCKET_IFNAME"] == "veth7"
    there = LaunchRequest(script="s.py", nproc_per_node=1, nnodes="2", rdzv_endpoint="198.51.100.8:1234")
    assert make_plan(there).is_host is False


def test_addresses_of_this_machine():
    assert own_address("localhost") in ("127.0.0.1", "::1")
    assert own_address("198.51.100.1") is None
    assert own_address("no.such.host.invalid") is None
    assert interface_of("127.0.0.1") is not None
    assert interface_of("a-name") is None
    assert address_towards(Endpoint("127.0.0.1", 80)) == "127.0.0.1"


@pytest.mark.parametrize(
    ("text", "endpoint"),
    [
        ("a:1", Endpoint("a", 1)),
        ("a", Endpoint("a", 29400)),
        ("[::1]:5", Endpoint("::1", 5)),
        ("::1", Endpoint("::1", 29400)),
    ],
)
def test_endpoints_are_read(text, endpoint):
    assert parse_endpoint(text) == endpoint
    assert parse_endpoint(str(endpoint)) == endpoint


def test_an_option_of_the_script_before_it_is_answered_with_its_place():
    words = ["--epochs", "2", "train.py"]
    with pytest.raises(Exception, match="--epochs") as caught:  # newer typers have a click of their own
        typer.main.get_command(launch_app()).main(words, standalone_mode=False)
    assert "a script's own options follow it" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "module", "message"),
    [
        ("train.ipynb", False, r"or call tp_launch.launch\(function, 2\) in the notebook"),
        ("train.sh", False, "is no Python program, as its ending '.sh' says"),
        ("train.py", True, "is a file, and -m takes the name of a module; leave -m out"),
    ],
)
def test_what_is_no_script_is_refused(tmp_path, monkeypatch, name, module, message):
    monkeypatch.chdir(tmp_path)
    Path(name).touch()
    with pytest.raises(ConfigError, match=message):
        execute(LaunchRequest(script=name, module=module))


@pytest.mark.parametrize(
    ("words", "is_warned"),
    [
        (["nope.py", "-n", "2"], True),
        (["nope.py", "--epochs", "2"], False),
        (["-n", "1", "nope.py", "-n", "2"], False),
    ],
)
def test_a_number_of_processes_that_the_script_gets_is_warned_of(capsys, words, is_warned):
    with pytest.raises(ConfigError, match="there is no script"):
        typer.main.get_command(launch_app()).main(words, standalone_mode=False)
    assert ("-n comes after the script, which gets it" in capsys.readouterr().err) == is_warned
