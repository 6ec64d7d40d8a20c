"""Rendezvous backends whose stores listen at one address; torch's own listen at every address.

Every program that reaches torch's store can write to it. torch's elastic rendezvous (c10d) keeps its state
there as a pickle, which every host loads: such a program could run code on all hosts. A static rendezvous
keeps no state.

It imports torch: import it only to start processes.
"""

import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # re-exported
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

from tp_launch._addresses import Endpoint, parse_endpoint

BOUND = {"c10d": "tp-bound-c10d", "static": "tp-bound-static"}
"""The names of the backends here, by the names of torch's corresponding backends."""

_READ_S = 60  # torch's own
_JOIN_S = 600  # torch's own
_GRACE_S = 3.0  # before the wait for an answer is logged


def serve_store(address: str, port: int, **options: Any) -> TCPStore:
    """Serve a store at one address of this host."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((address, port))
            listener.listen(socket.SOMAXCONN)
        except OSError as error:
            where = Endpoint(address, port)
            msg = f"cannot listen at {where}: {error.strerror}"
            raise RendezvousConnectionError(msg) from error
        bound = listener.getsockname()[1]
        # TCPStore has no argument for its address, but it takes over a listening descriptor, and closes it.
        return TCPStore(
            address, bound, is_master=True, multi_tenant=True, master_listen_fd=listener.detach(), **options
        )


class _StaticRendezvous(RendezvousHandler):
    """A rendezvous of hosts with fixed numbers, at a store of host 0."""

    def __init__(self, endpoint: Endpoint, *, bind: str, rank: int, size: int, run_id: str, join_s: int):
        self._endpoint, self._bind = endpoint, bind
        self._rank, self._size = rank, size
        self._run_id = run_id
        self._timeout = timedelta(seconds=join_s)
        self._store: TCPStore | None = None

    def get_backend(self) -> str:
        return BOUND["static"]

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        host, port = self._endpoint.host, self._endpoint.port
        if self._store is None and self._rank == 0:
            self._store = serve_store(self._bind, port, world_size=self._size, timeout=self._timeout)
        elif self._store is None:
            self._store = TCPStore(
                host, port, self._size, is_master=False, timeout=self._timeout, multi_tenant=True
            )
        place = RendezvousStoreInfo(host, self._store.port)
        return RendezvousInfo(PrefixStore(self._run_id, self._store), self._rank, self._size, place)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        return

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True


def _create_static(params: RendezvousParameters) -> RendezvousHandler:
    return _StaticRendezvous(
        parse_endpoint(params.endpoint),
        bind=params.get("bind"),
        rank=int(params.get("rank", 0)),
        size=params.max_nodes,
        run_id=params.run_id,
        join_s=int(params.get("timeout", _JOIN_S)),
    )


class _C10dBackend(C10dRendezvousBackend):
    @property
    def name(self) -> str:
        return BOUND["c10d"]  # torch compares it with the backend in the parameters


def _create_c10d(params: RendezvousParameters) -> RendezvousHandler:
    """Return torch's elastic rendezvous, with both of its stores at one address."""
    endpoint, bind = parse_endpoint(params.endpoint), params.get("bind")
    timeout = timedelta(seconds=params.get_as_int("read_timeout", _READ_S) or _READ_S)
    if params.get_as_bool("is_host"):
        store = serve_store(bind, endpoint.port, timeout=timeout)
    else:
        try:
            store = TCPStore(
                endpoint.host, endpoint.port, is_master=False, multi_tenant=True, timeout=timeout
            )
        except (ValueError, RuntimeError) as error:
            msg = f"cannot reach the store at {endpoint}"
            raise RendezvousConnectionError(msg) from error
    handler = create_handler(store, _C10dBackend(store, params.run_id), params)

    def serve(_address: str, port: int) -> TCPStore:
        return serve_store(bind, port)

    # The ranks' store, which host 0 serves. torch has no public way to choose its address; without this line
    # it listens at every address. test_private_torch.py notices if torch renames the method.
    handler._create_tcp_store_server = serve  # type: ignore[assignment,method-assign]
    return handler


rendezvous_handler_registry.register(BOUND["static"], _create_static)
rendezvous_handler_registry.register(BOUND["c10d"], _create_c10d)


def answers(endpoint: Endpoint, *, timeout_s: float, log: Callable[[str], None]) -> bool:
    """Return whether a store answers within ``timeout_s`` at an endpoint where something listens.

    torch's own client waits forever for the first answer, in native code and without a message.
    """
    done = threading.Event()

    def connect() -> None:
        try:
            TCPStore(
                endpoint.host,
                endpoint.port,
                is_master=False,
                wait_for_workers=False,
                timeout=timedelta(seconds=timeout_s),
            )
        except (ValueError, RuntimeError):
            return  # the connection was closed: no answer either
        done.set()

    # A daemon: the native call may never return.
    threading.Thread(target=connect, name="tp-launch-probe", daemon=True).start()
    if done.wait(min(_GRACE_S, timeout_s)):
        return True
    log(f"something listens at {endpoint}, but does not answer as the rendezvous of a launch; waiting for it")
    return done.wait(max(0.0, timeout_s - _GRACE_S))
