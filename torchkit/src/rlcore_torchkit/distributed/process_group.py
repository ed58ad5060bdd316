"""The default process group of torch.distributed, shared by the trainers of one process and destroyed with the last."""

import os
import socket
from datetime import timedelta
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from rlcore.spi.context import RankInfo
from rlcore.spi.errors import ContractError

LOOPBACKS = ("lo", "lo0")
"""Names of the loopback interface on Linux and macOS."""
LAZY_GLOO = "TORCH_GLOO_LAZY_INIT"
"""torch's variable for groups of gloo whose ranks connect when they first exchange something."""
LAZY_FROM = 256
"""Ranks from which on they do. Among fewer all pairs connect at once: whoever waits for a rank that has died is told at once,
and not after 100 s."""

_num_users = 0
_is_ours = False


def join(rank_info: RankInfo, timeout_s: float) -> None:
    """Make the default group, or use the one that exists; pair with `leave`.

    Raises ContractError where a group of another size or rank exists, or where several ranks have no rendezvous.
    """
    global _num_users, _is_ours
    if dist.is_initialized():
        found = (dist.get_rank(), dist.get_world_size())
        if found != (rank_info.rank, rank_info.world_size):
            expected = f"rank {rank_info.rank} of {rank_info.world_size}"
            raise ContractError(f"process group: found rank {found[0]} of {found[1]}; expected {expected}, or none yet")
    else:
        _initialize(rank_info, timeout_s)
        _is_ours = True
    _num_users += 1


def leave() -> None:
    """Give up one use; the last destroys the group if `join` made it."""
    global _num_users, _is_ours
    _num_users -= 1
    if _num_users == 0 and _is_ours:
        dist.destroy_process_group()
        _is_ours = False


def _initialize(rank_info: RankInfo, timeout_s: float) -> None:
    # No device_id: with one, NCCL would connect every group when it is made, whether it is used or not, and all ranks would
    # take part in it each time.
    options: dict[str, Any] = {
        "backend": "cpu:gloo,cuda:nccl" if rank_info.device == "cuda" else "gloo",
        "rank": rank_info.rank,
        "world_size": rank_info.world_size,
        "timeout": timedelta(seconds=timeout_s),
    }
    # Otherwise every rank reads every other's list of addresses, one for each pair, from rank 0's store, for each group.
    if rank_info.world_size >= LAZY_FROM:
        os.environ.setdefault(LAZY_GLOO, "1")
    if rank_info.world_size == 1:
        keep_on_loopback()
        store = dist.HashStore()  # type: ignore[attr-defined]  # no socket for a group of one
        dist.init_process_group(store=store, **options)
    elif rank_info.rendezvous is None:
        raise ContractError(
            f"rendezvous: found None with {rank_info.world_size} ranks; expected an address such as tcp://host:port"
        )
    elif urlsplit(rank_info.rendezvous).scheme == "tcp":
        dist.init_process_group(store=_tcp_store(rank_info, timedelta(seconds=timeout_s)), **options)
    else:
        dist.init_process_group(init_method=rank_info.rendezvous, **options)


def loopback_variables() -> dict[str, str]:
    """Return the environment variables by which ranks of one machine connect by its loopback interface: gloo and NCCL would
    listen on a network, and take everyone who connects for a rank."""
    name = next((name for _, name in socket.if_nameindex() if name in LOOPBACKS), None)
    return {} if name is None else {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": name}


def keep_on_loopback() -> None:
    """Set `loopback_variables` for this process and those that it starts, but where the user has named an interface."""
    for variable, name in loopback_variables().items():
        os.environ.setdefault(variable, name)


def listening_store(host: str, port: int, world_size: int, timeout: timedelta, **options: Any) -> TCPStore:
    """Rank 0's store, which listens on this one address; torch's own choice is every interface, for everyone."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen()
        store = TCPStore(
            host, port, world_size, is_master=True, timeout=timeout, master_listen_fd=listening.fileno(), **options
        )
        listening.detach()  # the store's from now on
        return store


def _tcp_store(rank_info: RankInfo, timeout: timedelta) -> TCPStore:
    parts = urlsplit(rank_info.rendezvous or "")
    if parts.hostname is None or parts.port is None:
        raise ContractError(f"rendezvous: found {rank_info.rendezvous!r}; expected an address such as tcp://host:port")
    if is_loopback(parts.hostname):
        keep_on_loopback()
    if rank_info.rank == 0:
        return listening_store(parts.hostname, parts.port, rank_info.world_size, timeout)
    return TCPStore(parts.hostname, parts.port, rank_info.world_size, is_master=False, timeout=timeout)


def is_loopback(host: str) -> bool:
    """Return whether an address is this machine's own, which no other one reaches."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
