"""The request of a launch, as plain values that can be written to a file."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from tp_core.errors import ConfigError

from tp_trainer._launch._fields import check_fields

__all__ = ["LaunchRequest", "parse_rdzv_conf"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRequest:
    """One run of a script on some processes of this host, and maybe of other hosts.

    Attributes:
        script: The path of a Python program, or the name of a module when ``module`` is true.
        args: What the program finds in ``sys.argv[1:]``, passed on as it is.
        module: Whether ``script`` is run as ``python -m`` does.
        nproc_per_node: Processes on this host; "auto" is one per accelerator, or one.
        nnodes: Hosts of the job: "2", or "1:4" for at least one and at most four.
        node_rank: The number of this host, for the static rendezvous.
        rdzv_backend: How hosts find each other; None is "static" where a node rank or a master
            address is given, and "c10d" elsewhere.
        rdzv_endpoint: ``host:port`` of the rendezvous.
        rdzv_id: The name of the job, the same on all its hosts.
        rdzv_conf: Further options of the rendezvous, as torch names them.
        master_addr: The address of host 0, for the static rendezvous.
        master_port: The port on host 0, for the static rendezvous.
        max_restarts: How often all processes are started again after a failure.
        monitor_interval_s: Seconds between two looks at the processes.
        log_dir: Where the logs of the ranks stay; None removes them after the run.
        local_addr: The address under which the other hosts reach this one; None finds it out.
        bind_addr: The only address of this host at which its stores listen.
        grace_s: Seconds between asking the processes to end and killing them.
        host_timeout_s: Seconds after which a host of the job that gives no sign counts as lost.
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
        """Refuse numbers that no launch can have."""
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

    def to_dict(self) -> dict[str, Any]:
        """Return the request as values that JSON can hold."""
        return {**asdict(self), "args": list(self.args), "rdzv_conf": dict(self.rdzv_conf)}

    @classmethod
    def from_dict(cls, values: object) -> "LaunchRequest":
        """Return the request that ``to_dict`` wrote; what a later version added is left out.

        Raises:
            StateError: The values are not those of a request.
            ConfigError: A number is out of range.
        """
        return cls(**check_fields(cls, values, what="the request"))


def parse_rdzv_conf(text: str) -> dict[str, str]:
    """Return ``"timeout=60,is_host=1"`` as a dict.

    Raises:
        ConfigError: A part is not a ``key=value``.
    """
    conf: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = part.partition("=")
        if not (key.strip() and equals and value.strip()):
            msg = f"--rdzv-conf must look like key=value,key=value; got {part!r}"
            raise ConfigError(msg)
        conf[key.strip()] = value.strip()
    return conf
