"""A launch on one host can be reached from that host alone, and what it keeps there runs no code."""

import ipaddress
import socket
import sys

import psutil
import pytest
from torch.distributed import TCPStore
from tp_launch import LaunchRequest, execute

from tests.launches import Tp

_HELD = """
with open(f"part{rank}", "w") as file:
    file.write(os.environ["MASTER_ADDR"] + " " + os.environ["MASTER_PORT"])
os.rename(f"part{rank}", f"master{rank}")
while not os.path.exists("go"):
    time.sleep(0.05)
dist.all_reduce(torch.ones(1))
dist.destroy_process_group()
"""


def _listening(pids: list[int]) -> set[tuple[str, int]]:
    """Where the processes and their children listen."""
    found = set()
    for pid in pids:
        process = psutil.Process(pid)
        for member in [process, *process.children(recursive=True)]:
            for connection in member.net_connections("inet"):
                if connection.status == psutil.CONN_LISTEN:
                    found.add(connection.laddr)
    return {(place.ip, place.port) for place in found}


def test_an_address_that_is_taken_is_named(tmp_path, free_port):
    script = tmp_path / "script.py"
    script.touch()
    request = LaunchRequest(script=str(script), nproc_per_node=1, node_rank=0, master_port=free_port)
    with socket.create_server(("127.0.0.1", free_port)):
        assert f"cannot listen at 127.0.0.1:{free_port}: Address" in execute(request).message


def _end(tp: Tp, *processes) -> None:
    (tp.cwd / "go").touch()
    for process in processes:
        _, err = process.communicate(timeout=800)
        assert process.returncode == 0, err


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="others do not tell the sockets of processes")
def test_a_launch_on_one_host_listens_for_that_host_alone_and_keeps_no_pickle(tp, monkeypatch):
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    process = tp.start("launch", "-n", "1", tp.script(_HELD, gloo=True))
    address, port = tp.wait_for("master0", timeout_s=800).split()
    places = _listening([process.pid])
    assert (address, int(port)) in places
    assert len(places) > 1  # gloo's are among them
    assert all(ipaddress.ip_address(ip).is_loopback for ip, _ in places), places
    store = TCPStore(address, int(port), is_master=False, wait_for_workers=False)
    keys = store.list_keys()
    assert keys
    # What torch's elastic rendezvous would unpickle in the launcher, whoever wrote it.
    assert not [key for key in keys if "torch.rendezvous" in key]
    _end(tp, process)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="others do not tell the sockets of processes")
@pytest.mark.parametrize("kind", ["c10d", pytest.param("static", marks=pytest.mark.nightly)])
def test_launches_that_meet_at_a_loopback_address_listen_there_alone(tp, free_port, kind):
    script = tp.script(_HELD, gloo=True)
    options = ["-n", "1", "--nnodes", "2"]
    endpoint = ["--rdzv-endpoint", f"127.0.0.1:{free_port}"]
    if kind == "static":
        endpoint = ["--master-addr", "127.0.0.1", "--master-port", str(free_port)]
    hosts = []
    for number in range(2):
        own = ["--node-rank", str(number)] if kind == "static" else []
        hosts.append(tp.start("launch", *options, *endpoint, *own, script))
    for rank in range(2):
        tp.wait_for(f"master{rank}", timeout_s=800)
    places = _listening([host.pid for host in hosts])
    assert ("127.0.0.1", free_port) in places
    assert all(ipaddress.ip_address(ip).is_loopback for ip, _ in places), places
    _end(tp, *hosts)
