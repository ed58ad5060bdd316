"""Trainers of one process share a default group, which may be somebody else's."""

import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import psutil
import pytest
import torch
import torch.distributed as dist

from rlcore.spi import ContractError, RankInfo
from rlcore_torchkit.distributed import process_group

ONE = RankInfo()


@pytest.fixture
def others() -> Iterator[dist.ProcessGroup]:
    """A default group that was there before."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_the_last_to_leave_destroys_the_group() -> None:
    process_group.join(ONE, 60.0)
    process_group.join(ONE, 60.0)
    process_group.leave()
    assert dist.is_initialized()
    process_group.leave()
    assert not dist.is_initialized()


def test_a_group_that_was_there_stays(others: dist.ProcessGroup) -> None:
    process_group.join(ONE, 60.0)
    process_group.leave()
    assert dist.group.WORLD is others


@pytest.mark.usefixtures("others")
def test_a_group_of_another_size_is_refused() -> None:
    with pytest.raises(ContractError, match="rank 0 of 1; .* rank 1 of 2"):
        process_group.join(RankInfo(rank=1, world_size=2, rendezvous="env://"), 60.0)


def listening() -> set[str]:
    connections = psutil.Process().net_connections(kind="inet")
    return {each.laddr.ip for each in connections if each.status == psutil.CONN_LISTEN}


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_the_store_of_several_ranks_listens_on_its_own_address_alone(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    before = listening()
    with socket.socket(family) as held:  # keeps the port from others until the store has it
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            held.bind((host, 0))
        except OSError:
            pytest.skip(f"this machine has no {host}")
        port = held.getsockname()[1]
        store = process_group.listening_store(host, port, 2, timedelta(seconds=300), wait_for_workers=False)
    other = dist.TCPStore(host, port, 2, is_master=False, wait_for_workers=False)
    other.set("key", "value")
    assert store.get("key") == b"value"
    assert listening() - before <= {host}


def test_the_first_of_several_ranks_joins_by_such_a_store(monkeypatch: pytest.MonkeyPatch) -> None:
    before, stores = listening(), []
    monkeypatch.setattr(dist, "init_process_group", lambda *, store, **options: stores.append(store))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    first, second = (RankInfo(rank=rank, world_size=2, rendezvous=f"tcp://127.0.0.1:{port}") for rank in range(2))
    with ThreadPoolExecutor(2) as threads:  # each waits for the other
        for joined in [threads.submit(process_group.join, rank_info, 60.0) for rank_info in (first, second)]:
            joined.result()
    stores[0].set("key", "value")
    assert stores[1].get("key") == b"value"
    assert listening() - before <= {"127.0.0.1"}
    for _ in stores:
        process_group.leave()


def test_ranks_of_one_machine_connect_by_its_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")  # to be put back afterwards
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")
    process_group.join(ONE, 60.0)
    process_group.leave()
    assert os.environ["GLOO_SOCKET_IFNAME"] in process_group.LOOPBACKS
    assert os.environ["NCCL_SOCKET_IFNAME"] == "eth7", "the user's own choice"


class CountingStore(dist.Store):
    """A store in this process that counts what is read of it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.read = dist.HashStore(), list[str]()

    def set(self, key, value):
        self.inner.set(key, value)

    def get(self, key):
        self.read.append(key)
        return self.inner.get(key)

    def wait(self, keys, *timeout):
        self.inner.wait(keys, *timeout)


@pytest.mark.parametrize(
    ("lazy_from", "chosen", "expected"),
    [(1, None, 2 * 6 + 2), (2, None, 6 * 6), (1, "0", 6 * 6)],
    ids=["many", "few", "the user's"],
)
def test_each_rank_reads_as_little_of_the_store_however_many_there_are(
    lazy_from: int, chosen: str | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_group, "LAZY_FROM", lazy_from)
    monkeypatch.setenv(process_group.LAZY_GLOO, "")  # to be put back afterwards
    monkeypatch.delenv(process_group.LAZY_GLOO)
    if chosen is not None:
        monkeypatch.setenv(process_group.LAZY_GLOO, chosen)
    process_group.join(ONE, 60.0)
    process_group.leave()
    store, groups = CountingStore(), {}

    def use(rank: int) -> list[float]:
        groups[rank] = dist.ProcessGroupGloo(store, rank, 6, timedelta(seconds=300))
        added, sent = torch.full((3,), float(rank)), torch.full((1,), float(rank))
        groups[rank].allreduce([added]).wait()
        if rank == 5:
            groups[rank].send([sent], 2, 0).wait()
        if rank == 2:
            groups[rank].recv([sent], 5, 0).wait()
        return [*added.tolist(), *sent.tolist()]

    with ThreadPoolExecutor(6) as threads:
        found = list(threads.map(use, range(6)))
    assert found == [[15.0] * 3 + [5.0 if rank == 2 else rank] for rank in range(6)]
    assert len(store.read) == expected


@pytest.mark.parametrize("rendezvous", ["tcp://127.0.0.1", "tcp://:29500"])
def test_an_address_without_a_port_or_host_is_refused(rendezvous: str) -> None:
    with pytest.raises(ContractError, match="tcp://host:port"):
        process_group.join(RankInfo(world_size=2, rendezvous=rendezvous), 60.0)
