"""Parts on their way to an engine's ranks, without an engine."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from attrs import evolve

from rlcore.spi import ExportWeightsRequest, RefitError
from rlcore_torchkit.shard_route import whole_box
from rlcore_torchkit.shard_sender import ShardSender
from rlcore_vllm.channels import shards
from rlcore_vllm.manifest import Manifest

from .channel_support import CPU, here, specs_of, tensors_of

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
        held = {whole_box(spec): tensor for spec, tensor in zip(specs, tensors, strict=True)}
        export = sender.export(
            evolve(REQUEST, delta=delta),
            specs,
            [*held],
            lambda part, held=held: {whole_box(spec): held[whole_box(spec)] for spec in part},
        )
        if not receivers:
            options = route.options(export.shards)
            assert [each["first_receiver"] for each in options] == [0, 2]
            receivers = [shards.Receiver(CPU, rank.rank, options[rank.replica]) for rank in ranks]
        export.shards.route = route.to(specs)
        layout = route.layout(specs, export.shards)
        assert layout["delta"] == delta
        assert ("held" in layout) == (specs not in seen)
        seen.add(specs)
        manifest, taken = Manifest.of(export), [{} for _ in receivers]
        with ThreadPoolExecutor(4) as pool:
            sent = pool.submit(list, export.buckets)
            calls = [
                pool.submit(one.take_shards, manifest, layout, into.update, False)
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


def test_a_later_route_has_groups_of_its_own():
    """A trainer that outlives an engine knows the first one's groups, and the port may be the same."""
    specs = specs_of(tensors_of(0))
    assert len({shards.Route([here()], LOOPBACK, 30).to(specs).name for _ in range(2)}) == 2


def test_whole_buckets_are_refused():
    route = shards.Route([here()], LOOPBACK, 30)
    export = ShardSender(0, 1, CPU).export(REQUEST, tuple(specs_of(tensors_of(0))), [], lambda _: {})
    receiver = shards.Receiver(CPU, 0, route.options(export.shards)[0])
    with pytest.raises(RefitError, match="expected parts"):
        receiver.receive({}, [])


def test_ranks_of_one_machine_meet_on_its_loopback():
    assert shards.meeting_host([here()], "tcp://127.0.0.1:4000") == LOOPBACK
    assert shards.meeting_host([here()], None) == LOOPBACK
