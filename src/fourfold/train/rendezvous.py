"""The rendezvous of elastic agents: on one node over the loopback, on several nodes at one address each.

    torchrun --rdzv-backend fourfold --rdzv-endpoint node0:29400 --nnodes 4 ...          several nodes
    torchrun --rdzv-backend fourfold --rdzv-endpoint localhost --nproc-per-node 4 ...    one node in an open network

torch's own rendezvous listens on all interfaces of a machine, so whoever reaches any of them reaches the job. It also
keeps one store for all starts, in which restarted ranks would find the addresses of ranks that are gone. On one node
`job.find_store` looks past those, so plain torchrun is enough there.

torchrun loads this file wherever Fourfold is installed, so the file imports little.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.api import RendezvousHandlerCreator
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, create_handler
from torch.distributed.elastic.rendezvous.utils import _matches_machine_hostname, parse_rendezvous_endpoint

from fourfold.job import LOOPBACK, serve

BACKEND = "fourfold"
"""The value of torchrun's --rdzv-backend that selects this file."""
LOCAL = "fourfold-here"
"""The backend that our own launcher names, for ranks on one machine."""
WATCH = "watch"
"""The key of the rendezvous's configuration with the function that watches its store."""
PORT = 29400
"""The port of an endpoint without a port; torchrun has the same default."""
TIMEOUT = timedelta(seconds=60)
"""How long an agent waits for an answer from the store; torch's own rendezvous waits as long."""


class LocalRendezvous(RendezvousHandler):
    """The rendezvous of a single node, with its store on the loopback."""

    def __init__(self, name: str, backend: str, watch: Callable[[dist.TCPStore], None] | None = None) -> None:
        """`watch` gets the store of each start before its ranks start."""
        self._name, self._backend, self._watch = name, backend, watch
        self._store: dist.TCPStore | None = None

    def get_backend(self) -> str:
        return self._backend

    def next_rendezvous(self) -> RendezvousInfo:
        self._store = serve(LOOPBACK)  # a new one for each start: restarted ranks share no key with those before
        where = RendezvousStoreInfo(LOOPBACK, self._store.port)
        if self._watch is not None:
            self._watch(self._store)
        return RendezvousInfo(dist.PrefixStore(self._name, self._store), 0, 1, where)

    @property
    def use_agent_store(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None: ...

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._name

    def shutdown(self) -> bool:
        return True


rendezvous_handler_registry.register(LOCAL, lambda params: LocalRendezvous(params.run_id, LOCAL, params.get(WATCH)))


class NodesRendezvous(DynamicRendezvousHandler):
    """torch's rendezvous of several nodes, with a new store for each start, which listens at one address."""

    def get_backend(self) -> str:
        return BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        # forgets the store of the last start, so that torch makes a new one
        self._shared_tcp_store_server = self._bootstrap_store_info = None
        return super().next_rendezvous()

    def _create_tcp_store_server(self, master_addr: str, master_port: int) -> dist.TCPStore:
        return serve(master_addr, master_port)


def handler() -> RendezvousHandlerCreator:
    """Return the function that makes the rendezvous; torchrun calls this one, which pyproject.toml names."""
    return among_nodes


def among_nodes(params: RendezvousParameters) -> RendezvousHandler:
    """Make the rendezvous of several nodes, or that of one node where the job has no more.

    The stores of several nodes listen at the endpoint, and at the address of rank 0's node: its host name, or its
    --local-addr.
    """
    if params.max_nodes == 1:
        return LocalRendezvous(params.run_id, BACKEND)
    host, port = parse_rendezvous_endpoint(params.endpoint, default_port=PORT)
    is_host = params.get_as_bool("is_host")
    store = _store(host, port, _matches_machine_hostname(host) if is_host is None else is_host)
    found = create_handler(store, C10dRendezvousBackend(store, params.run_id), params)
    found.__class__ = NodesRendezvous  # torch makes its own class only; this one adds no state to it
    return found


def _store(host: str, port: int, is_host: bool) -> dist.Store:
    """Return the store at the rendezvous endpoint.

    The agent on that host creates it; a second agent on the same host connects.
    """
    if is_host:
        with suppress(OSError):  # the port is taken: another agent was first
            return serve(host, port, TIMEOUT)
    return dist.TCPStore(host, port, is_master=False, timeout=TIMEOUT)
