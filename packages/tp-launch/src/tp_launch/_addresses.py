"""Addresses of hosts: which ones are this machine's, by its network interfaces, and which ones answer.

torch compares host *names* to decide which host serves the rendezvous. In containers and network namespaces
names may not match: then no host serves, and every host waits until its deadline.
"""

import ipaddress
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil
from tp_core.errors import ConfigError

_DEFAULT_PORT = 29400  # torch's own default for a rendezvous without a port


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The host and port of the rendezvous of a job."""

    host: str
    port: int

    def __str__(self) -> str:
        if ":" in self.host:
            return f"[{self.host}]:{self.port}"
        return f"{self.host}:{self.port}"


def parse_endpoint(text: str, *, option: str = "--rdzv-endpoint") -> Endpoint:
    """Return ``host``, ``host:port`` or ``[v6 address]:port`` as an endpoint."""
    text = text.strip()
    host = text
    port = str(_DEFAULT_PORT)
    if text.startswith("["):
        host, _, tail = text[1:].partition("]")
        port = tail.removeprefix(":") or port
    elif text.count(":") == 1:
        host, port = text.split(":")
    if not host or not port.isdigit() or int(port) > 65535:
        msg = f"{option} must look like host:port with a port up to 65535; got {text!r}"
        raise ConfigError(msg)
    return Endpoint(host, int(port))


def resolve(host: str) -> list[str]:
    """Return the addresses of a host, none when its name is unknown here."""
    try:
        entries = socket.getaddrinfo(host, None, proto=socket.IPPROTO_TCP)
    except (OSError, UnicodeError):
        return []
    return [str(entry[4][0]).partition("%")[0] for entry in entries]  # without the zone of an IPv6 address


def interface_of(address: str) -> str | None:
    """Return the network interface of this machine that has an address, or None."""
    try:
        wanted = ipaddress.ip_address(address)
    except ValueError:  # a name, which may resolve to several addresses
        return None
    for name, entries in psutil.net_if_addrs().items():
        for entry in entries:
            if entry.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            if ipaddress.ip_address(entry.address.partition("%")[0]) == wanted:
                return name
    return None


def own_address(host: str) -> str | None:
    """Return the address under which ``host`` names this machine, or None when it names another one."""
    for address in resolve(host):
        if ipaddress.ip_address(address).is_loopback or interface_of(address) is not None:
            return address
    return None


def address_towards(endpoint: Endpoint) -> str | None:
    """Return the address of this machine from which ``endpoint`` is reached, or None."""
    for address in resolve(endpoint.host):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((address, endpoint.port or 1))  # a datagram socket: nothing is sent
            except OSError:
                continue
            return str(probe.getsockname()[0])
    return None


def wait_for_endpoint(endpoint: Endpoint, *, timeout_s: float, log: Callable[[str], None]) -> bool:
    """Wait until a program listens at the endpoint; return False after ``timeout_s``.

    torch's own wait runs in native code, ignores Ctrl-C, and prints nothing.
    """
    start = time.monotonic()
    is_logged = False
    while True:
        try:
            socket.create_connection((endpoint.host, endpoint.port), timeout=1.0).close()
        except OSError as error:
            waited_s = time.monotonic() - start
            if waited_s >= timeout_s:
                return False
            if waited_s >= 3 and not is_logged:
                log(f"waiting for the rendezvous host at {endpoint} ({error.strerror or error})")
                is_logged = True
            time.sleep(0.2)
        else:
            return True
