"""The request of a launch, and its plan, which finds every mistake before a process starts."""

import importlib.util
import ipaddress
import os
import sys
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path

from tp_core.arguments import explain_init
from tp_core.errors import ConfigError
from tp_core.launching import ON_TERMINAL, available_cores, check_process_count
from tp_core.messages import did_you_mean, file_meant
from tp_core.output import StandardStream

from tp_launch._addresses import (
    Endpoint,
    address_towards,
    interface_of,
    own_address,
    parse_endpoint,
    resolve,
)

_LOOPBACK = "127.0.0.1"
_TRUE = {"1", "true", "t", "yes", "y"}
_FALSE = {"0", "false", "f", "no", "n"}


_explain_request = partial(
    explain_init,
    instead=dict.fromkeys(("nproc", "processes", "n"), "LaunchRequest(script='train.py', nproc_per_node=2)"),
)


@_explain_request
@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRequest:
    """One run of a script on processes of this host, and maybe of other hosts.

    Attributes:
        script: The path of a Python program, or the name of a module if ``module`` is true.
        args: The program's ``sys.argv[1:]``, passed on unchanged.
        module: Whether to run ``script`` as ``python -m`` does.
        nproc_per_node: Processes on this host; "auto" is one per accelerator, or one.
        nnodes: Hosts of the job: "2", or "1:4" for at least one and at most four.
        node_rank: The number of this host, for the static rendezvous.
        rdzv_backend: How hosts find each other; None is "static" with a node rank or a master address, and
            "c10d" otherwise.
        rdzv_endpoint: ``host:port`` of the rendezvous.
        rdzv_id: The name of the job, the same on all its hosts.
        rdzv_conf: Further options of the rendezvous, as torch names them.
        master_addr: The address of host 0, for the static rendezvous.
        master_port: The port on host 0, for the static rendezvous.
        max_restarts: How often to restart all processes after a failure.
        monitor_interval_s: Seconds between two looks at the processes.
        log_dir: The directory to keep the ranks' logs in; None removes them after the run.
        local_addr: The address of this host for the other hosts; None looks for it.
        bind_addr: The only address of this host at which its stores listen.
        grace_s: Seconds between asking the processes to end and killing them.
        host_timeout_s: Seconds after which a silent host of the job counts as lost.
        name: A name for people.

    Raises:
        ConfigError: A number is out of range.

    Example:
        >>> LaunchRequest(script="train.py", args=("--lr", "0.1"), nproc_per_node=2).script
        'train.py'
    """

    script: str
    args: tuple[str, ...] = ()
    module: bool = False
    nproc_per_node: int | str = "auto"
    nnodes: str = "1"
    node_rank: int | None = None
    rdzv_backend: str | None = None
    rdzv_endpoint: str | None = None
    rdzv_id: str | None = None
    rdzv_conf: Mapping[str, str] = field(default_factory=dict)
    master_addr: str | None = None
    master_port: int | None = None
    max_restarts: int = 0
    monitor_interval_s: float = 0.1
    log_dir: str | None = None
    local_addr: str | None = None
    bind_addr: str | None = None
    grace_s: float = 30.0
    host_timeout_s: float = 15.0
    name: str | None = None

    def __post_init__(self) -> None:
        """Refuse numbers that no launch can have, and systems that end no groups of processes."""
        if not hasattr(os, "killpg"):
            msg = "tp launch needs Linux or macOS; on Windows write: torchrun --nproc-per-node 2 script.py"
            raise ConfigError(msg)
        if self.max_restarts < 0:
            msg = f"--max-restarts must be 0 or more, got {self.max_restarts}"
            raise ConfigError(msg)
        if not self.monitor_interval_s > 0:
            msg = f"--monitor-interval must be above 0 seconds, got {self.monitor_interval_s}"
            raise ConfigError(msg)
        if not self.grace_s >= 0:
            msg = f"--grace-s must be 0 seconds or more, got {self.grace_s}"
            raise ConfigError(msg)
        if not self.host_timeout_s >= 1:
            msg = f"--host-timeout-s must be 1 second or more, got {self.host_timeout_s}"
            raise ConfigError(msg)
        if self.node_rank is not None and self.node_rank < 0:
            msg = f"--node-rank must be 0 or more, got {self.node_rank}"
            raise ConfigError(msg)

    @property
    def command(self) -> tuple[str, ...]:
        """The words after ``python``: the script, or ``-m`` and the module, and the arguments."""
        program = ("-m", self.script) if self.module else (self.script,)
        return program + self.args


def parse_rdzv_conf(text: str) -> dict[str, str]:
    """Return ``"timeout=60,is_host=1"`` as a dict."""
    conf: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = part.partition("=")
        if not (key.strip() and equals and value.strip()):
            msg = f"--rdzv-conf must look like key=value,key=value; got {part!r}"
            raise ConfigError(msg)
        conf[key.strip()] = value.strip()
    return conf


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    """A request with every default filled in for this machine.

    Attributes:
        request: The request.
        nproc: Processes on this host.
        min_nodes: The fewest hosts of the job.
        max_nodes: The most hosts of the job.
        backend: The name of the rendezvous backend.
        endpoint: The rendezvous endpoint for torch.
        run_id: The name of the job for the rendezvous.
        is_host: Whether this host serves the rendezvous; None leaves that to torch.
        may_follow: Whether, if the port is taken, another launch on this machine may be the server.
        local_addr: The address of this host for the other hosts.
        bind: The only address at which this host's stores listen; None is all addresses.
        env: Environment variables for the processes, unless they are set already.
    """

    request: LaunchRequest
    nproc: int
    min_nodes: int
    max_nodes: int
    backend: str
    endpoint: Endpoint | str
    run_id: str
    is_host: bool | None
    may_follow: bool
    local_addr: str | None
    bind: str | None
    env: dict[str, str]


def make_plan(request: LaunchRequest) -> LaunchPlan:
    """Fill in the defaults of a request, and refuse one that cannot work."""
    if not isinstance(request, LaunchRequest):
        msg = (
            f"execute() takes a LaunchRequest, got {request!r:.80}; write "
            "execute(LaunchRequest(script='train.py', nproc_per_node=2))"
        )
        raise ConfigError(msg)
    if request.log_dir is not None and not isinstance(request.log_dir, str | os.PathLike):
        msg = f"--log-dir must be the path of a directory, got {request.log_dir!r}"
        raise ConfigError(msg)
    if isinstance(request.args, str):
        msg = f"args must be a tuple of texts, as ('--lr', '0.1'), got one text, {request.args!r}"
        raise ConfigError(msg)
    nproc = _process_count(request.nproc_per_node)
    min_nodes, max_nodes = _node_counts(request.nnodes)
    _check_script(request)
    if request.log_dir is not None and Path(request.log_dir).is_file():
        msg = f"--log-dir must be a directory; {request.log_dir!r} is a file"
        raise ConfigError(msg)
    backend = _backend(request)
    endpoint = _endpoint(request, backend=backend, max_nodes=max_nodes)
    if backend == "static":
        _check_static(request, min_nodes=min_nodes, max_nodes=max_nodes)
    is_host, may_follow = _rendezvous_role(request, backend=backend, endpoint=endpoint)
    bind = _bind(request, endpoint=endpoint)
    if max_nodes == 1 and backend in ("c10d", "static"):
        if is_host is False:
            msg = (
                f"{endpoint} is not an address of this host, and --nnodes is 1; say how many hosts there "
                "are, or leave the address out"
            )
            raise ConfigError(msg)
        # The static rendezvous keeps no state in the store; torch's elastic one keeps a pickle there.
        port = endpoint.port if isinstance(endpoint, Endpoint) else 0
        backend, endpoint, bind = "static", Endpoint(_LOOPBACK, port), _LOOPBACK
        is_host, may_follow = True, False
    local_addr = request.local_addr or request.bind_addr
    if local_addr is None and isinstance(endpoint, Endpoint):
        local_addr = own_address(endpoint.host) or address_towards(endpoint)
    single = max_nodes == 1 and request.rdzv_endpoint is None
    default_id = uuid.uuid4().hex[:12] if single else "tp"
    return LaunchPlan(
        request=request,
        nproc=nproc,
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        backend=backend,
        endpoint=endpoint,
        run_id=request.rdzv_id or default_id,
        is_host=is_host,
        may_follow=may_follow,
        local_addr=local_addr,
        bind=bind,
        env=_environment(nproc=nproc, max_nodes=max_nodes, local_addr=local_addr),
    )


_NO_PROGRAMS = {".csv", ".ipynb", ".json", ".jsonl", ".md", ".pt", ".sh", ".toml", ".txt", ".yaml", ".yml"}


def _check_script(request: LaunchRequest) -> None:
    if not request.module:
        if not Path(request.script).exists():
            path, _, rest = request.script.partition(" ")
            if rest and Path(path).exists():
                words = ", ".join(map(repr, rest.split()))
                msg = (
                    f"there is no script {request.script!r}, but a {path!r}: give its arguments by "
                    f"themselves, on a command line without quotes, in a LaunchRequest as args=({words},)"
                )
                raise ConfigError(msg)
            msg = (
                f"there is no script {request.script!r} in {Path.cwd()}; give the path of a Python "
                f"file, or -m and the name of a module{file_meant(Path(request.script))}"
            )
            raise ConfigError(msg)
        if Path(request.script).is_dir() and not Path(request.script, "__main__.py").exists():
            msg = (
                f"{request.script!r} is a folder without a __main__.py; give the path of a Python file, or "
                "-m and the name of a module"
            )
            raise ConfigError(msg)
        suffix = Path(request.script).suffix
        if suffix in _NO_PROGRAMS:
            hint = ""
            if suffix == ".ipynb":
                hint = "; save it as a script, or call tp_launch.launch(function, 2) in the notebook"
            msg = f"{request.script!r} is no Python program, as its ending {suffix!r} says{hint}"
            raise ConfigError(msg)
        return
    if request.script.endswith(".py") and Path(request.script).exists():
        msg = f"{request.script!r} is a file, and -m takes the name of a module; leave -m out to run the file"
        raise ConfigError(msg)
    top = request.script.partition(".")[0]
    sys.path.insert(0, "")  # as for ``python -m``; the console script ``tp`` does not have it
    try:
        is_importable = importlib.util.find_spec(top) is not None
    except (ImportError, ValueError):
        is_importable = False
    finally:
        sys.path.remove("")
    if not is_importable:
        msg = (
            f"there is no module {request.script!r}: {top!r} was found neither in {Path.cwd()} nor "
            "among the installed packages; leave -m out to run a file"
        )
        raise ConfigError(msg)


def _node_counts(text: str) -> tuple[int, int]:
    parts = text.split(":")
    if len(parts) > 2 or not all(part.isdigit() for part in parts):
        msg = f"--nnodes must be a number or MIN:MAX, such as 2 or 1:4; got {text!r}"
        raise ConfigError(msg)
    low, high = int(parts[0]), int(parts[-1])
    if not 0 < low <= high:
        msg = f"--nnodes must be at least 1, and MIN not above MAX; got {text!r}"
        raise ConfigError(msg)
    return low, high


def _process_count(requested: int | str) -> int:
    if requested == "auto":
        import torch

        if not torch.accelerator.is_available():
            return 1
        return max(1, torch.accelerator.device_count())
    try:
        count = int(requested)
    except (TypeError, ValueError):
        count = 0
    if isinstance(requested, bool) or (isinstance(requested, float) and count != requested):
        count = 0
    if count < 1:
        msg = f"-n/--nproc-per-node must be 1 or more processes, or 'auto'; got {requested!r}"
        if requested == "p":  # of -np 2, which is mpirun's
            msg += "; -np is -n here: tp launch -n 2 script.py"
        raise ConfigError(msg)
    check_process_count("-n/--nproc-per-node", count)
    return count


def _backend(request: LaunchRequest) -> str:
    asks_static = request.node_rank is not None or request.master_addr is not None
    if request.rdzv_backend is None:
        if asks_static:
            return "static"
        return "c10d"
    if request.rdzv_backend == "c10d" and asks_static:
        msg = (
            "--node-rank and --master-addr belong to the static rendezvous, and --rdzv-backend c10d "
            "was given; c10d numbers the hosts itself: leave them out, or leave the backend out"
        )
        raise ConfigError(msg)
    names = {"c10d", "etcd", "etcd-v2", "static", *(e.name for e in entry_points(group="torchrun.handlers"))}
    if request.rdzv_backend not in names:
        msg = (
            f"--rdzv-backend must be one of {', '.join(sorted(names))}; got {request.rdzv_backend!r}"
            f"{did_you_mean(request.rdzv_backend, names)}"
        )
        raise ConfigError(msg)
    return request.rdzv_backend


def _endpoint(request: LaunchRequest, *, backend: str, max_nodes: int) -> Endpoint | str:
    if backend == "c10d" and request.rdzv_conf.get("store_type", "tcp") == "file":
        return request.rdzv_endpoint or ""
    if request.rdzv_endpoint is not None:
        endpoint = parse_endpoint(request.rdzv_endpoint)
    elif backend == "static":
        default_host = "127.0.0.1" if max_nodes == 1 else None
        host = request.master_addr or default_host
        if host is None:
            msg = (
                "several hosts need an address where they meet: give --master-addr (the address of "
                "host 0) and --master-port"
            )
            raise ConfigError(msg)
        # 29500 is torchrun's default master port.
        if request.master_port is None:
            port = 29500
        else:
            port = request.master_port
        endpoint = parse_endpoint(f"[{host}]:{port}", option="--master-addr and --master-port")
    elif max_nodes == 1:
        return Endpoint("127.0.0.1", 0)  # port 0: the system chooses a free one
    else:
        msg = (
            f"--nnodes {request.nnodes} needs an address where the hosts meet: give every host the "
            "same --rdzv-endpoint HOST:PORT, with the address of one of them"
        )
        raise ConfigError(msg)
    if max_nodes > 1 and endpoint.port == 0:
        msg = f"several hosts need a port that all of them know; got {endpoint}"
        raise ConfigError(msg)
    return endpoint


def _check_static(request: LaunchRequest, *, min_nodes: int, max_nodes: int) -> None:
    if min_nodes != max_nodes:
        msg = f"the static rendezvous needs a fixed number of hosts; got --nnodes {request.nnodes}"
        raise ConfigError(msg)
    if request.node_rank is None and max_nodes > 1:
        msg = (
            f"the static rendezvous of {max_nodes} hosts needs --node-rank on each, from 0 to {max_nodes - 1}"
        )
        raise ConfigError(msg)
    if (request.node_rank or 0) >= max_nodes:
        msg = (
            f"--node-rank must be from 0 to {max_nodes - 1} for --nnodes {request.nnodes}; got "
            f"{request.node_rank}"
        )
        raise ConfigError(msg)


def _rendezvous_role(
    request: LaunchRequest, *, backend: str, endpoint: Endpoint | str
) -> tuple[bool | None, bool]:
    """Return whether this host serves the rendezvous, and whether it may become a client instead."""
    if not isinstance(endpoint, Endpoint):
        return None, False
    if backend == "static":
        return (request.node_rank or 0) == 0, False
    if backend != "c10d":
        return None, False
    is_host = request.rdzv_conf.get("is_host")
    if is_host is not None:
        if is_host.lower() not in _TRUE | _FALSE:
            msg = f"--rdzv-conf is_host must be 0 or 1; got {is_host!r}"
            raise ConfigError(msg)
        return is_host.lower() in _TRUE, False
    return own_address(endpoint.host) is not None, endpoint.port != 0


def _bind(request: LaunchRequest, *, endpoint: Endpoint | str) -> str | None:
    """Return the only address at which the stores listen, or ``None`` for all addresses."""
    if request.bind_addr is not None:
        if interface_of(request.bind_addr) is None:
            msg = (
                f"--bind-addr must be an address of this host, such as those that `ip addr` shows; got "
                f"{request.bind_addr!r}"
            )
            raise ConfigError(msg)
        return request.bind_addr
    if not isinstance(endpoint, Endpoint):
        return None
    # "Hosts" with a loopback rendezvous are launches on this machine: no other machine needs to reach them.
    return next((text for text in resolve(endpoint.host) if ipaddress.ip_address(text).is_loopback), None)


def _environment(*, nproc: int, max_nodes: int, local_addr: str | None) -> dict[str, str]:
    env = {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
    if StandardStream("stderr").isatty():
        env[ON_TERMINAL] = "1"
    if nproc > 1:  # a single process gets all cores, as is torch's default
        env["OMP_NUM_THREADS"] = str(max(1, available_cores() // nproc))
    own_addr = _LOOPBACK if max_nodes == 1 else local_addr or ""
    interface = interface_of(own_addr)
    if interface is not None:
        # By itself gloo resolves the host's name: it may choose an interface that the other hosts cannot
        # reach, or that hosts outside of the job can.
        env["GLOO_SOCKET_IFNAME"] = interface
        if max_nodes == 1:
            env["NCCL_SOCKET_IFNAME"] = interface
    return {name: value for name, value in env.items() if name not in os.environ}
