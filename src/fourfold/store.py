"""The job's key-value store, which listens at one address. torch's own listens on all interfaces of a machine."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from fourfold.errors import CollectiveError, LostPeerError

LOOPBACK = "127.0.0.1"
AGENT_HAS_ONE = "TORCHELASTIC_USE_AGENT_STORE"
"""By which torch knows that the store at MASTER_ADDR is there already."""
LOST_PEER = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "remote process exited")
"""Parts of the sentences in which gloo and NCCL say that another process is gone; they have no type for it."""


def serve(host: str, port: int = 0, timeout: timedelta | None = None) -> dist.TCPStore:
    """A store that is reached by this name of the machine alone; port 0: any that is free."""
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.create_server(address[:2], family=family, backlog=socket.SOMAXCONN) as listening:
        store = dist.TCPStore(
            host,
            listening.getsockname()[1],
            is_master=True,
            wait_for_workers=False,
            timeout=timeout or dist.default_pg_timeout,
            master_listen_fd=listening.fileno(),
        )
        listening.detach()  # it is the store's now
    return store


def join(rank: int, world: int, timeout: timedelta | None) -> dist.Store | None:
    """The store of a job whose ranks know its address from the environment; rank 0 has it.

    None where torchrun has made one, and where nobody has said where it is: torch knows what to say then.
    """
    env = os.environ
    host, port = env.get("MASTER_ADDR"), env.get("MASTER_PORT")
    if env.get(AGENT_HAS_ONE) == "True" or not host or not port:
        return None
    if rank == 0:
        of_node = int(env.get("LOCAL_WORLD_SIZE") or env.get("SLURM_NTASKS_PER_NODE") or world)
        require_reachable(host, world // of_node)
        return serve(host, int(port), timeout)
    return dist.TCPStore(host, int(port), timeout=timeout or dist.default_pg_timeout)


def require_reachable(host: str, nodes: int) -> None:
    """Refuse a name that means the loopback on its own machine, where other nodes must find it."""
    found = {str(address[0]) for *_, address in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    if nodes > 1 and all(ipaddress.ip_address(address).is_loopback for address in found):
        raise ValueError(
            f"MASTER_ADDR={host} is {', '.join(sorted(found))} on its own node, where no other node reaches it; set "
            "MASTER_ADDR to that node's address on the network that the ranks shall use"
        )


@contextmanager
def typed(what: str) -> Iterator[None]:
    """Turn the backend's errors into types: `LostPeerError` where another process is gone, else `CollectiveError`.

    This is the only place that reads the backend's sentences.
    """
    try:
        yield
    except (torch.OutOfMemoryError, CollectiveError):
        raise  # out of memory keeps its type: callers may free memory and try again
    except RuntimeError as error:
        lost = any(words in str(error) for words in LOST_PEER)
        raise (LostPeerError if lost else CollectiveError)(f"collective failed: {what}: {error}") from error
