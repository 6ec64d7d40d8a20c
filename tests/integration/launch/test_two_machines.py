"""Two hosts with a network of their own each, joined by a cable that can be cut.

They are network namespaces of this machine with a veth pair between them. Both have the same host
name, as containers often do.
"""

import shutil
import subprocess
import sys

import pytest

from tests.launches import Tp, wait_until

_COMMAND = [sys.executable, "-c", "from tp_launch._command import launch_app; launch_app()()"]
_ADDRESSES = ("10.77.0.1", "10.77.0.2")
_TRAIN = """
    import pathlib, time, torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset
    from tp_trainer import Checkpoints, Trainer

    def step(model, batch):
        time.sleep(0.05)
        pathlib.Path("steps").open("a").write(".")
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    trainer = Trainer(seed=0, devices="cpu", progress=False)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = TensorDataset(torch.randn(800, 4), torch.randn(800, 1))
    checkpoint = Checkpoints("checkpoints", every_steps=5)
    history = trainer.fit(
        model, optimizer, DataLoader(data, batch_size=8), step=step, epochs=1,
        checkpoint=checkpoint, resume="auto",
    )
    print("trained on", trainer.world_size, flush=True)
"""


class Machines:
    """Two namespaces; commands run inside them, and the cable between them can be cut."""

    def __init__(self, tp: Tp) -> None:
        self._tp = tp
        self._holders = [self._hold(["unshare", "--user", "--map-root-user", "--net"])]
        self._holders.append(self._hold([*self.enter(0, net=False), "unshare", "--net"]))
        self._ip(0, f"link add eth0 type veth peer name eth1 netns {self._holders[1].pid}")
        for host, address in enumerate(_ADDRESSES):
            for words in (f"addr add {address}/24 dev eth{host}", f"link set eth{host} up", "link set lo up"):
                self._ip(host, words)

    def _hold(self, command: list[str]) -> subprocess.Popen[str]:
        """Keep a namespace open: it lives as long as this process does, whose pipe to it stays open."""
        held = subprocess.Popen(
            [
                *command,
                "sh",
                "-c",
                "echo here; exec cat > /dev/null",
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._tp.started.append(held)
        assert held.stdout is not None
        if held.stdout.readline() != "here\n":
            raise OSError("namespaces are not allowed")
        return held

    def enter(self, host: int, *, net: bool = True) -> list[str]:
        """The words before a command that is to run on a host."""
        own = ["--net"] if net else []
        return ["nsenter", "-t", str(self._holders[host].pid), "--user", "--preserve-credentials", *own]

    def _ip(self, host: int, words: str) -> None:
        subprocess.run([*self.enter(host), "ip", *words.split()], check=True, timeout=800)

    def launch(self, host: int, *args: str) -> subprocess.Popen[str]:
        return self._tp.start_command([*self.enter(host), *_COMMAND, *args])

    def listening(self, host: int) -> set[str]:
        """The addresses at which anything on a host listens."""
        look = "import psutil; print(*(c.laddr.ip for c in psutil.net_connections() if c.status == 'LISTEN'))"
        command = [*self.enter(host), sys.executable, "-c", look]
        done = subprocess.run(command, check=True, timeout=800, capture_output=True, text=True)
        return set(done.stdout.split())

    def cut(self) -> None:
        self._ip(1, "link set eth1 down")


@pytest.fixture
def machines(tp: Tp) -> Machines:
    if sys.platform != "linux" or not all(map(shutil.which, ("unshare", "nsenter", "ip"))):
        pytest.skip("needs the namespaces of Linux, and iproute2")
    try:
        return Machines(tp)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"this machine does not let us make network namespaces: {error}")


def _start(machines: Machines, tp: Tp, *options: str) -> list[subprocess.Popen[str]]:
    endpoint = ["--rdzv-endpoint", f"{_ADDRESSES[0]}:29511"]
    script = tp.script(_TRAIN)
    started = []
    for host in (0, 1):
        own = [option.format(own=_ADDRESSES[host]) for option in options]
        started.append(machines.launch(host, *endpoint, "-n", "1", *own, script))
    return started


def _has_trained(tp: Tp, steps: int) -> None:
    path = tp.cwd / "steps"
    wait_until(lambda: path.exists() and path.stat().st_size >= steps)


@pytest.mark.takes(50)
@pytest.mark.slow
def test_a_host_that_is_cut_off_ends_the_job_on_both_with_the_reason(machines, tp):
    hosts = _start(machines, tp, "--nnodes", "2", "--host-timeout-s", "10")
    _has_trained(tp, 20)  # with each other: neither host starts alone
    machines.cut()
    ends = [host.communicate(timeout=800)[1] for host in hosts]
    assert [host.returncode for host in hosts] == [1, 1], ends
    assert f"({_ADDRESSES[1]}) was lost: it has not been heard of for 10 s\n" in ends[0]
    assert f"the rendezvous host at {_ADDRESSES[0]}:29511 was lost: it has not answered for 10 s\n" in ends[1]


@pytest.mark.takes(50)
@pytest.mark.slow
def test_hosts_that_are_bound_listen_at_their_own_address_alone(machines, tp):
    hosts = _start(machines, tp, "--nnodes", "2", "--bind-addr", "{own}")
    _has_trained(tp, 20)
    for number, address in enumerate(_ADDRESSES):
        assert machines.listening(number) == {address}
    for host in hosts:
        _, err = host.communicate(timeout=800)
        assert host.returncode == 0, err


@pytest.mark.takes(70)
@pytest.mark.slow
def test_an_elastic_job_goes_on_without_a_host_that_is_cut_off(machines, tp):
    elastic = ["--nnodes", "1:2", "--max-restarts", "1", "--rdzv-conf", "last_call_timeout=3"]
    hosts = _start(machines, tp, *elastic, "--host-timeout-s", "10")
    _has_trained(tp, 40)
    machines.cut()
    out, err = hosts[0].communicate(timeout=800)
    assert hosts[0].returncode == 0, err
    assert "was lost" in err
    assert "restart 1 of 1, on 1 host" in err
    assert "was saved by 2 ranks, and this run has 1" in err  # it went on from the last checkpoint
    assert "trained on 1" in out
    assert hosts[1].wait(800) == 1
