"""Parts on their way to an engine's ranks, without an engine."""

import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from attrs import evolve
from channel_support import CPU, here, specs_of, tensors_of

from rlcore.spi import ExportWeightsRequest, RefitError, ShardSlice
from rlcore_torchkit.refit import shard_route
from rlcore_torchkit.refit.shard_group import ProcessShardGroup
from rlcore_torchkit.refit.shard_sender import ShardSender
from rlcore_torchkit.refit.shard_slices import whole_slice
from rlcore_vllm.channels import shards
from rlcore_vllm.channels.manifest import Manifest

LOOPBACK = "127.0.0.1"
REQUEST = ExportWeightsRequest(weight_version=1, dtype="float32", max_bucket_bytes=64, sharded=True)


def test_every_rank_of_every_replica_takes_all_tensors_again_and_again():
    ranks = [here(), here(rank=1), here(replica=1)]
    route = shards.Route(ranks, shards.meeting_host(ranks, None), 30)
    sender, receivers, seen, sent_bytes = ShardSender(0, 1, CPU), [], set(), []
    # The third as adapters that travel alone; those behind it ask for changes alone, or do no more.
    for seed, count, delta in ((0, 4, "off"), (1, 4, "off"), (2, 2, "off"), (1, 4, "device"), (1, 4, "device"), (3, 4, "off")):
        tensors = tensors_of(seed, count)
        specs = tuple(specs_of(tensors))
        held = {whole_slice(spec): tensor for spec, tensor in zip(specs, tensors, strict=True)}
        export = sender.export(
            evolve(REQUEST, delta=delta),
            specs,
            [*held],
            lambda part, held=held: {whole_slice(spec): held[whole_slice(spec)] for spec in part},
        )
        if not receivers:
            options = route.options(export.shards)
            assert [each["first_receiver"] for each in options] == [0, 2]
            receivers = [shards.Receiver(CPU, rank.rank, options[rank.replica]) for rank in ranks]
        export.shards.route = route.to(specs, [None] * len(ranks))
        layout = route.layout(specs, export.shards)
        assert layout["delta"] == delta
        assert ("held" in layout) == (specs not in seen)
        seen.add(specs)
        manifest, taken = Manifest.of(export), [{} for _ in receivers]
        with ThreadPoolExecutor(4) as pool:
            sent = pool.submit(list, export.buckets)
            calls = [
                pool.submit(one.take_shards, manifest, layout, lambda tensors, _, into=into: into.update(tensors), False)
                for one, into in zip(receivers, taken, strict=True)
            ]
        assert sent.result() == []
        assert sum(call.result() for call in calls) % 2**64 == export.shards.digest
        sent_bytes.append(export.shards.sent_bytes)
        for found in taken:
            assert [*found] == [spec.name for spec in specs]
            assert all(torch.equal(found[spec.name], tensor) for spec, tensor in zip(specs, tensors, strict=True))
    assert sent_bytes[1] == sent_bytes[3] == sent_bytes[5] > 2 * sent_bytes[4]
    for one in (sender, *receivers):
        one.close()


class Trial:
    """A trainer of one rank that holds whole tensors, and two engines, of two ranks and one."""

    def __init__(self):
        self.ranks = [here(), here(rank=1), here(replica=1)]
        self.sender, self.receivers, self.holds_halves = ShardSender(0, 1, CPU), [], False
        self.connect()

    def connect(self):
        """As for the first time, and after a failure."""
        for one in self.receivers:
            one.close()
        self.route, self.receivers = shards.Route(self.ranks, LOOPBACK, 30), []

    def refit(self, seed, told, delta="off", count=4):
        """What each rank has loaded, the names of what it has in part, the bytes that it received, and the digest; or what it
        raises."""
        tensors = tensors_of(seed, count)
        specs = tuple(specs_of(tensors))
        held = self.held_of(specs, tensors)
        read = lambda part: {box: held[box] for box in held if box.name in {spec.name for spec in part}}  # noqa: E731
        self.export = export = self.sender.export(evolve(REQUEST, delta=delta), specs, [*held], read)
        if not self.receivers:
            options = self.route.options(export.shards)
            self.receivers = [shards.Receiver(CPU, rank.rank, options[rank.replica]) for rank in self.ranks]
        export.shards.route = self.route.to(specs, told)
        layout, manifest = self.route.layout(specs, export.shards), Manifest.of(export)
        with ThreadPoolExecutor(4) as pool:
            sent = pool.submit(list, export.buckets)
            calls = [pool.submit(self.take, one, manifest, layout) for one in self.receivers]
        found = [call.exception() or call.result() for call in calls]
        if not any(isinstance(each, Exception) for each in found):
            assert sent.result() == []
            assert sum(digest for _, _, _, digest in found) % 2**64 == export.shards.digest
        return tensors, found

    def held_of(self, specs, tensors):
        found = {}
        for spec, tensor in zip(specs, tensors, strict=True):
            rows = spec.shape[0] // 2 if self.holds_halves else 0
            for start, stop in ((0, rows), (rows, spec.shape[0])):
                if start < stop:
                    found[ShardSlice(spec.name, (start, 0), (stop, spec.shape[1]))] = tensor[start:stop]
        return found

    def take(self, receiver, manifest, layout):
        taken, partial = {}, set()

        def load(tensors, in_part):
            taken.update({name: tensor.clone() for name, tensor in tensors.items()})
            partial.update(in_part)

        digest = receiver.take_shards(manifest, layout, load, False)
        return taken, partial, receiver.received_bytes, digest

    def close(self):
        for one in (self.sender, *self.receivers):
            one.close()


@pytest.fixture
def trial():
    made = Trial()
    yield made
    made.close()


FIRST = {"t0": [[[0, 0], [2, 5]]], "t1": [[[0, 0], [4, 2]]], "t2": [], "t3": []}
SECOND = {"t0": [[[2, 0], [3, 5]]], "t1": [[[0, 1], [4, 4]]], "t2": [[[1, 0], [2, 5]], [[4, 0], [5, 5]]], "t3": []}
UNTOLD = [None, None, None]


def assert_taken(found, tensors, needs):
    taken, partial, _, _ = found
    for index, tensor in enumerate(tensors):
        for start, stop in needs.get(f"t{index}", [[[0, 0], list(tensor.shape)]]):
            place = tuple(map(slice, start, stop))
            assert torch.equal(taken[f"t{index}"][place], tensor[place])
    assert partial == {name for name in needs if name in taken} - {"t3"}


@pytest.mark.parametrize("delta", ["off", "host"])
def test_each_rank_takes_what_it_needs(delta, trial):
    """Of what one rank of three needs, all, and two some that overlap, the trainer sends each element once."""
    whole = sum(tensor.nbytes for tensor in tensors_of(0))
    _, found = trial.refit(0, UNTOLD, delta)
    assert [partial for _, partial, _, _ in found] == [set()] * 3
    most, sent = [each[2] for each in found], trial.export.shards.sent_bytes
    for seed, told in ((1, [FIRST, SECOND, None]), (2, UNTOLD), (3, UNTOLD)):
        tensors, found = trial.refit(seed, told, delta)
        for each, needs in zip(found, (FIRST, SECOND, {}), strict=True):
            assert_taken(each, tensors, needs)
        assert [*found[0][0]] == ["t0", "t1"]
        assert [*found[1][0]] == ["t0", "t1", "t2"]
        assert sent / 2 < trial.export.shards.sent_bytes < sent + 16 * 20, "the digests and ends of more buckets"
    if delta == "off":
        assert max(found[0][2], found[1][2]) < 0.7 * most[0]
        assert found[2][2] >= whole


def test_what_no_rank_needs_is_taken_by_one(trial):
    trial.refit(0, UNTOLD)
    tensors, found = trial.refit(1, [FIRST, SECOND, FIRST])
    holders = [taken for taken, _, _, _ in found if "t3" in taken]
    assert len(holders) == 1
    assert torch.equal(holders[0]["t3"], tensors[3])


@pytest.mark.parametrize(
    ("told", "counts", "restarts_at", "num_groups"),
    [
        ((UNTOLD, UNTOLD, UNTOLD), (4, 4, 4), None, 1),
        ((UNTOLD, [FIRST, SECOND, None], UNTOLD), (4, 4, 4), None, 1),
        ((UNTOLD, [FIRST, SECOND, None], [SECOND, FIRST, SECOND]), (4, 4, 4), None, 1),
        ((UNTOLD, UNTOLD, [FIRST, SECOND, None]), (4, 2, 4), None, 1),
        ((UNTOLD, [FIRST, SECOND, None], UNTOLD), (4, 4, 4), 2, 2),
        ((UNTOLD, [FIRST, SECOND, None], UNTOLD), (4, 4, 4), 1, 2),
    ],
    ids=[
        "one plan",
        "parts from the second refit on",
        "other parts each time",
        "adapters between",
        "an engine starts anew before the last refit",
        "an engine starts anew before the second refit",
    ],
)
def test_a_group_lasts_as_long_as_its_ranks(told, counts, restarts_at, num_groups, trial, monkeypatch):
    """All ranks are in one of four; sets of two or three of them share."""
    made, make = [], dist.ProcessGroupGloo

    def counted(at, rank, size, timeout):
        made.append((size, rank))
        return make(at, rank, size, timeout)

    monkeypatch.setattr(dist, "ProcessGroupGloo", counted)
    for seed, (needs, count) in enumerate(zip(told, counts, strict=True)):
        if seed == restarts_at:
            trial.connect()
        _, found = trial.refit(seed, needs, count=count)
        assert not any(isinstance(each, Exception) for each in found)
    assert sorted(rank for size, rank in made if size == 4) == sorted([0, 1, 2, 3] * num_groups)


def test_what_a_trainer_holds_may_change(trial):
    """The same refit names the new parts to the engines."""
    trial.refit(0, UNTOLD)
    trial.holds_halves = True
    tensors, found = trial.refit(1, UNTOLD)
    assert all(torch.equal(taken[f"t{index}"], tensor) for taken, *_ in found for index, tensor in enumerate(tensors))


def test_needs_that_change_come_by_another_plan(trial):
    """A rank that has noted nothing any more takes all again."""
    routes = []
    for seed, told in enumerate((UNTOLD, [FIRST, None, FIRST], UNTOLD, [{}, None, None], [FIRST, None, None])):
        tensors, found = trial.refit(seed, told)
        routes.append(trial.export.shards.route)
        assert_taken(found[0], tensors, FIRST if seed in {1, 2, 4} else {})
        assert_taken(found[1], tensors, {})
    assert [each is last for each, last in pairwise(routes)] == [False, True, False, False]
    assert len({route.name for route in routes}) == 1


def test_a_corrupted_part_is_noticed_by_the_rank_that_gets_it(trial, monkeypatch):
    """And by the one that it passes it on to; not by one that has nothing in common with it."""
    needs = [FIRST, {**SECOND, "t1": []}, None]
    trial.refit(0, UNTOLD)
    exchange = ProcessShardGroup.exchange

    def changed(group, sent, received):
        for peer, message in sent:
            if peer == 2:
                message[0] ^= 1
        exchange(group, sent, received)

    with monkeypatch.context() as patch:
        patch.setattr(ProcessShardGroup, "exchange", changed)
        _, (first, *others) = trial.refit(1, needs)
    assert not isinstance(first, RefitError)
    for error in others:
        assert isinstance(error, RefitError)
        assert "changed on the way: t0 from rank 0" in str(error)
    trial.connect()
    trial.refit(2, needs)


def test_a_rank_that_plans_otherwise_is_refused_by_all(trial, monkeypatch):
    trial.refit(0, UNTOLD)
    plan, take, odd = shard_route.plan_windows, trial.take, list[threading.Thread]()

    def other(specs, held, wanted, max_bytes):
        is_odd = threading.current_thread() in odd
        return plan(specs, held, [wanted[0], *wanted[:2]] if is_odd else wanted, max_bytes)

    def take_as_one(receiver, manifest, layout):
        if receiver is trial.receivers[1]:
            odd.append(threading.current_thread())
        return take(receiver, manifest, layout)

    monkeypatch.setattr(shard_route, "plan_windows", other)
    trial.take = take_as_one
    _, found = trial.refit(1, [FIRST, SECOND, None])
    for error in found:
        assert isinstance(error, RefitError)
        assert "planned other pieces than rank 0" in str(error)


def test_a_later_connection_has_a_group_of_its_own():
    """A trainer that outlives an engine knows the first one's groups, and the port may be the same."""
    specs = specs_of(tensors_of(0))
    assert len({shards.Route([here()], LOOPBACK, 30).to(tuple(specs), [None]).name for _ in range(2)}) == 2


def test_whole_buckets_are_refused():
    route = shards.Route([here()], LOOPBACK, 30)
    export = ShardSender(0, 1, CPU).export(REQUEST, tuple(specs_of(tensors_of(0))), [], lambda _: {})
    receiver = shards.Receiver(CPU, 0, route.options(export.shards)[0])
    with pytest.raises(RefitError, match="expected parts"):
        receiver.receive({}, [])


def test_ranks_of_one_machine_meet_on_its_loopback():
    assert shards.meeting_host([here()], "tcp://127.0.0.1:4000") == LOOPBACK
    assert shards.meeting_host([here()], None) == LOOPBACK
