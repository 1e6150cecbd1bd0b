"""How elastic agents meet: on one node without listening to anybody else, on several at one address each.

    torchrun --rdzv-backend fourfold --rdzv-endpoint node0:29400 ...

torch's own rendezvous listens on all interfaces of a machine, so whoever reaches any of them reaches the job. It also
keeps one store for all starts, where ranks that are started again find the addresses of the dead.
"""

from __future__ import annotations

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

BACKEND, HERE = "fourfold", "fourfold-here"
"""By which torchrun knows it, and our own launcher."""
PORT = 29400
TIMEOUT = timedelta(seconds=60)
"""For an answer of the store."""


class Here(RendezvousHandler):
    """The one node of a job, with its store on the loopback."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._store = serve(LOOPBACK)

    def get_backend(self) -> str:
        return HERE

    def next_rendezvous(self) -> RendezvousInfo:
        where = RendezvousStoreInfo(LOOPBACK, self._store.port)
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


rendezvous_handler_registry.register(HERE, lambda params: Here(params.run_id))


class AmongNodes(DynamicRendezvousHandler):
    """torch's, with a store for each start, which listens at one address."""

    def get_backend(self) -> str:
        return BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        self._shared_tcp_store_server = self._bootstrap_store_info = None
        return super().next_rendezvous()

    def _create_tcp_store_server(self, master_addr: str, master_port: int) -> dist.TCPStore:
        return serve(master_addr, master_port)


def handler() -> RendezvousHandlerCreator:
    """What torchrun asks for; pyproject.toml names it."""
    return among_nodes


def among_nodes(params: RendezvousParameters) -> RendezvousHandler:
    """Of several nodes. What listens does so at the endpoint, and at the address of the node of rank 0, which its host
    name or its --local-addr says."""
    host, port = parse_rendezvous_endpoint(params.endpoint, default_port=PORT)
    is_host = params.get_as_bool("is_host")
    store = _store(host, port, _matches_machine_hostname(host) if is_host is None else is_host)
    found = create_handler(store, C10dRendezvousBackend(store, params.run_id), params)
    found.__class__ = AmongNodes  # which adds no state; torch makes its own class alone
    return found


def _store(host: str, port: int, is_host: bool) -> dist.Store:
    """That of the endpoint, made where that is; two agents of one machine make it once."""
    if is_host:
        with suppress(OSError):
            return serve(host, port, TIMEOUT)
    return dist.TCPStore(host, port, is_master=False, timeout=TIMEOUT)
