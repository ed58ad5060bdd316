"""Several routes as one, and those who are told of it."""

import pytest
from attrs import evolve

from rlcore.spi import WorkerError
from rlcore.spi.weights import ShardSlice
from rlcore_torchkit.refit import shard_rendezvous
from rlcore_torchkit.refit.shard_rendezvous import RefitAnnouncement, Rendezvous, common_route, first_ranks

from .shard_threads import WHOLE, route_in, store  # type: ignore[import-not-found]


def test_a_route_to_all_ranks_has_a_name_of_its_own_each_time() -> None:
    at = store()
    one, other = route_in(at, [WHOLE, WHOLE], timeout_s=5.0), route_in(at, [WHOLE[:2]], name="others")
    common = common_route([one, other], 1)
    assert common.wanted == (WHOLE, WHOLE, WHOLE[:2])
    assert common.timeout_s == 30.0
    assert first_ranks([one, other]) == [0, 2]
    assert len({common.name, common_route([one, other], 2).name, common_route([other, one], 1).name, "engines"}) == 4


def test_a_single_route_is_the_common_one_the_first_time() -> None:
    route = route_in(store())
    assert common_route([route], 1) == route
    assert common_route([route], 2).name != route.name


def test_all_meet_at_an_address_that_other_machines_reach() -> None:
    here = route_in(store())
    there = evolve(here, address="10.0.0.7:4000", name="there")
    assert common_route([here, there], 1).address == "10.0.0.7:4000"


def test_every_refit_is_told_and_heard_in_order() -> None:
    at = store()
    own, other = route_in(at, [WHOLE, WHOLE]), route_in(at, name="others")
    told, ears = Rendezvous(own), [Rendezvous(own), Rendezvous(own)]
    common = common_route([other, own], 1)
    cut = evolve(common, wanted=(WHOLE[:2], *common.wanted[1:]))
    first, second = (common, RefitAnnouncement(common.name, 1, 1)), (cut, RefitAnnouncement(common.name, 2, 1))
    refits = [(own, RefitAnnouncement(own.name, 1, 0)), first, second, first, second]
    for refit in refits:
        told.tell(*refit)
    for ear in ears:
        heard = [ear.hear() for _ in refits]
        assert [(ear.route(announcement), announcement) for announcement in heard] == refits


def test_a_refit_that_does_not_come_is_an_error() -> None:
    at = store()
    with pytest.raises(WorkerError, match=r"127\.0\.0\.1:\d+ in 0\.1 s"):
        Rendezvous(route_in(at, timeout_s=0.1)).hear()


@pytest.mark.parametrize("value_bytes", [None, 4])
def test_a_route_of_any_size_is_heard(monkeypatch: pytest.MonkeyPatch, value_bytes: int | None) -> None:
    """The store takes no value of more than 8 MiB."""
    if value_bytes is not None:
        monkeypatch.setattr(shard_rendezvous, "VALUE_BYTES", value_bytes)
    num_parts = 140_000 if value_bytes is None else 3
    parts = tuple(
        ShardSlice(f"model.layers.{number}.mlp.experts.weight", (0, 0), (8, number + 1)) for number in range(num_parts)
    )
    at = store()
    route = route_in(at, [parts, parts[:2]])
    told, ear = Rendezvous(route), Rendezvous(route)
    told.tell(route, RefitAnnouncement(route.name, 1, 1))
    assert ear.route(ear.hear()) == route
