"""Two launches on this machine, as two hosts of one job."""

import signal
import socket
import threading

import psutil
import pytest
from tp_launch import LaunchRequest, execute  # threads of one process stand in for hosts

from tests.own_words import own_words

_SUM = "x = torch.ones(1); dist.all_reduce(x); print(rank, x.item(), flush=True)\n"
_SUM += "dist.destroy_process_group()\n"
_HELD = """
open(f"pid{rank}", "w").write(str(os.getpid()))
if rank == 1:
    raise ValueError("the cause")
time.sleep(600)  # it talks to nobody: only the launcher can tell it
"""


def _pair(tp, *options: str, script: str, each=((), ())):
    args = ["-n", "1", "--nnodes", "2", *options]
    return [tp.start("launch", *args, *own, script) for own in each]


@pytest.mark.slow
def test_the_first_that_binds_serves_the_rendezvous(tp, free_port):
    endpoint = ["--rdzv-endpoint", f"127.0.0.1:{free_port}"]
    hosts = _pair(tp, *endpoint, script=tp.script(_SUM, gloo=True))
    ends = [host.communicate(timeout=800) for host in hosts]
    assert [host.returncode for host in hosts] == [0, 0], ends
    assert sorted(out for out, _ in ends) == ["[rank0] 0 2.0\n", "[rank1] 1 2.0\n"]


@pytest.mark.slow
def test_static_hosts_have_the_ranks_they_were_given(tp, free_port):
    options = ["--master-addr", "127.0.0.1", "--master-port", str(free_port)]
    each = (["--node-rank", "1"], ["--node-rank", "0"])
    hosts = _pair(tp, *options, script=tp.script(_SUM, gloo=True), each=each)
    ends = [host.communicate(timeout=800) for host in hosts]
    assert [out for out, _ in ends] == ["[rank1] 1 2.0\n", "[rank0] 0 2.0\n"], ends


@pytest.mark.slow
def test_every_host_tells_the_cause_that_one_of_them_had(tp, free_port, gone):
    endpoint = ["--rdzv-endpoint", f"127.0.0.1:{free_port}"]
    hosts = _pair(tp, *endpoint, script=tp.script(_HELD, gloo=True))
    ends = [host.communicate(timeout=800) for host in hosts]
    for _, err in ends:
        block = err[err.rindex("rank 1 failed first") :]
        assert "ValueError: the cause" in block
    assert hosts[0].returncode == hosts[1].returncode != 0
    gone(*(int(tp.wait_for(f"pid{rank}")) for rank in range(2)))


@pytest.mark.slow
def test_a_host_that_is_done_hears_of_a_failure_that_comes_later(tp, free_port, until):
    script = tp.script(
        """
        import os, pathlib, sys, time
        if os.environ["RANK"] == "0":
            sys.exit()
        while not pathlib.Path("go").exists():
            time.sleep(0.05)
        sys.exit(6)
        """
    )
    endpoint = ["--rdzv-endpoint", f"127.0.0.1:{free_port}"]
    hosts = _pair(tp, *endpoint, "--log-dir", "logs", script=script)

    def pids_written() -> list[str]:
        return [text for path in (tp.cwd / "logs").rglob("pid") if (text := path.read_text())]

    until(lambda: len(pids_written()) == 2)
    pids = [int(text) for text in pids_written()]
    until(lambda: not all(psutil.pid_exists(pid) for pid in pids))  # collected: it was the first
    (tp.cwd / "go").touch()
    for host in hosts:
        _, err = host.communicate(timeout=800)
        assert host.returncode == 6
        assert "rank 1 failed first: exit code 6" in err


@pytest.mark.slow
def test_a_host_that_is_stopped_ends_the_job_on_the_other(tp, free_port, gone):
    endpoint = ["--rdzv-endpoint", f"127.0.0.1:{free_port}"]
    script = tp.script(
        """
        import os, time
        rank = os.environ["RANK"]
        open("pid" + rank, "w").write(str(os.getpid()))
        print("up", flush=True)
        time.sleep(600)
        """
    )
    hosts = _pair(tp, *endpoint, script=script)
    for host in hosts:
        assert host.stdout.readline().endswith("up\n")
    hosts[0].send_signal(signal.SIGINT)
    _, err = hosts[1].communicate(timeout=800)
    assert hosts[0].wait(800) == hosts[1].returncode == 130
    (told,) = (line for line in err.splitlines() if "stopped by SIGINT" in line)
    assert "nothing was saved by fit: rank" in told
    assert "host " in told
    gone(*(int(tp.wait_for(f"pid{rank}")) for rank in range(2)))


def test_a_host_without_a_rendezvous_says_so(tmp_path, free_port):
    script = tmp_path / "script.py"
    script.touch()
    request = LaunchRequest(
        script=str(script),
        nproc_per_node=1,
        nnodes="2",
        rdzv_endpoint=f"127.0.0.1:{free_port}",
        rdzv_conf={"is_host": "0", "timeout": "1"},
    )
    assert f"nobody answered at 127.0.0.1:{free_port} within 1 s" in execute(request).message


@pytest.mark.slow
def test_a_host_that_waits_for_the_rendezvous_can_be_stopped(tp, free_port):
    process = tp.start(
        *["launch", "-n", "1", "--nnodes", "2", "--rdzv-conf", "is_host=0"],
        *["--rdzv-endpoint", f"127.0.0.1:{free_port}", tp.script("")],
    )
    assert "waiting for the rendezvous host" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=800)
    said = "tp launch: stopped by SIGINT; nothing was saved: no rank had been started\n"
    assert (process.returncode, own_words(err)) == (130, said)


@pytest.mark.slow
def test_a_static_host_that_waits_in_native_code_can_be_stopped(tp, free_port, until):
    process = tp.start(
        *["launch", "-n", "1", "--nnodes", "2", "--node-rank", "0", "--master-addr", "127.0.0.1"],
        *["--master-port", str(free_port), tp.script("")],
    )

    def listens() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", free_port)) == 0

    until(listens)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=800)
    said = "tp launch: stopped by SIGTERM; nothing was saved: no rank had been started\n"
    assert (process.returncode, own_words(err)) == (143, said)


def test_a_port_where_something_else_listens_is_named(tp, free_port, capfd):
    request = LaunchRequest(
        script=str(tp.cwd / tp.script("")),
        nproc_per_node=1,
        nnodes="2",
        rdzv_endpoint=f"127.0.0.1:{free_port}",
        rdzv_conf={"timeout": "1"},
    )
    with socket.create_server(("127.0.0.1", free_port)):  # which takes calls, and says nothing
        said = execute(request).message
        assert "did not answer as the rendezvous of a launch; give another" in said
        assert "does not answer as the rendezvous of a launch; waiting for it" in capfd.readouterr().err
    # torch's client, which the launch left waiting in a thread, prints a traceback once the server closes.
    for thread in threading.enumerate():
        if thread.name == "tp-launch-probe":
            thread.join(800)
