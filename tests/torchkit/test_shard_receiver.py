"""Several ranks of engines, which get each part once and pass it on among themselves."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from attrs import evolve
from torch import Tensor

from rlcore.spi import RefitError, ShardSlice, TensorSpec, WorkerError
from rlcore_torchkit.refit.shard_cache import ShardCache
from rlcore_torchkit.refit.shard_group import ProcessShardGroup
from rlcore_torchkit.refit.shard_receiver import ShardReceiver
from rlcore_torchkit.refit.shard_route import whole_slice
from rlcore_torchkit.refit.shard_sender import ShardSender
from rlcore_torchkit.testing.ranks import free_address, launch

from .shard_rendezvous_ranks import run_rank  # type: ignore[import-not-found]
from .shard_threads import CPU, REQUEST, route_in, store, together  # type: ignore[import-not-found]

NUM_RANKS = 3
SPECS = tuple(TensorSpec(name=name, shape=(64, 32), dtype="bfloat16") for name in ("a", "b", "c"))
WHOLE = tuple(map(whole_slice, SPECS))
MODEL_BYTES, MAX_BYTES = 3 * 64 * 32 * 2, 2 * 64 * 32 * 2


class Trial:
    """A trainer of one rank, and engines of three in all."""

    def __init__(self, delta: str) -> None:
        self.at, self.sender = store(), ShardSender(0, 1, CPU)
        self.route = route_in(self.at, [WHOLE] * NUM_RANKS)
        self.request = evolve(REQUEST, dtype="bfloat16", max_bucket_bytes=MAX_BYTES, delta=delta)
        self.kept = [None if delta == "off" else ShardCache(CPU) for _ in range(NUM_RANKS)]
        self.receivers = list[ShardReceiver]()
        self.weights = {spec.name: torch.randn(spec.shape).bfloat16() for spec in SPECS}
        self.taken: list[dict[str, Tensor]] = [{} for _ in range(NUM_RANKS)]

    def refit(self, version: int) -> tuple[list[Any], int]:
        """What the trainer's rank and the others return or raise, and the bytes sent."""

        def read(specs: Sequence[TensorSpec]) -> dict[ShardSlice, Tensor]:
            return {whole_slice(spec): self.weights[spec.name] for spec in specs}

        export = self.sender.export(evolve(self.request, weight_version=version), SPECS, WHOLE, read)
        assert export.shards is not None
        export.shards.route = self.route
        held = export.shards.held
        if not self.receivers:
            self.receivers = [
                ShardReceiver(route=self.route, place=place, max_bytes=MAX_BYTES, device=CPU) for place in range(NUM_RANKS)
            ]
        found = together(
            lambda: list(export.buckets), *(partial(self.take, held, place, version) for place in range(NUM_RANKS))
        )
        if not any(isinstance(each, BaseException) for each in found):
            assert sum(found[1:]) % 2**64 == export.shards.digest
            assert all(torch.equal(taken[name], self.weights[name]) for taken in self.taken for name in self.weights)
        return found, export.shards.sent_bytes or 0

    def take(self, held: Sequence[Sequence[ShardSlice]], place: int, version: int) -> int:
        def load(parts: Sequence[tuple[TensorSpec, ShardSlice, Tensor]]) -> None:
            self.taken[place].update({spec.name: tensor.clone() for spec, _, tensor in parts})

        return self.receivers[place].take(SPECS, held, load, kept=self.kept[place], weight_version=version)

    def close(self) -> None:
        self.sender.close()
        for receiver in self.receivers:
            receiver.close()


@pytest.fixture
def trial_of() -> Iterator[Callable[[str], Trial]]:
    trials = list[Trial]()

    def make(delta: str = "off") -> Trial:
        trials.append(Trial(delta))
        return trials[-1]

    yield make
    for trial in trials:
        trial.close()


def test_generators_beside_two_ranks_share_one_copy_and_come_and_go() -> None:
    launch(run_rank, (free_address(),), 2)


def test_the_model_is_sent_once_however_many_want_it(trial_of: Callable[..., Trial]) -> None:
    trial = trial_of()
    for version in range(2):
        _, sent = trial.refit(version)
        assert sent == MODEL_BYTES + 2 * 8, "the digests of two buckets"


def test_changes_alone_travel_once_all_hold_one_version(trial_of: Callable[..., Trial]) -> None:
    trial = trial_of("device")
    sent = []
    for version in range(4):
        if version == 2:
            assert trial.kept[1] is not None
            trial.kept[1].version = 7
        trial.weights["b"][version] += 1.0
        found, num_bytes = trial.refit(version)
        assert not any(isinstance(each, BaseException) for each in found)
        sent.append(num_bytes)
    assert [each > MODEL_BYTES for each in sent] == [True, False, True, False]
    assert max(sent[1], sent[3]) < 0.1 * MODEL_BYTES


@pytest.mark.parametrize("delta", ["off", "device"])
def test_what_changes_from_one_engine_to_another_is_not_taken(
    delta: str, trial_of: Callable[..., Trial], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one rank alone: it holds the slices that the two others have passed on."""
    trial, share = trial_of(delta), ProcessShardGroup.share
    trial.refit(0)
    trial.weights["c"][:4] += 1.0

    def changing(group: ProcessShardGroup, rooms: Sequence[tuple[tuple[int, ...], Tensor]]) -> None:
        share(group, rooms)
        for ranks, room in rooms:
            if group.rank == ranks[-1]:
                room[0] ^= 1

    monkeypatch.setattr(ProcessShardGroup, "share", changing)
    (_, *others, error), _ = trial.refit(1)
    assert not any(isinstance(other, RefitError) for other in others)
    assert isinstance(error, RefitError)
    assert "changed on the way: a from rank 0" in str(error)


def test_an_engine_that_is_lost_is_missed_by_all(trial_of: Callable[..., Trial], monkeypatch: pytest.MonkeyPatch) -> None:
    """After it has got its slice, which the others wait for then."""
    trial, share = trial_of(), ProcessShardGroup.share
    trial.refit(0)

    def leaving(group: ProcessShardGroup, rooms: Sequence[tuple[tuple[int, ...], Tensor]]) -> None:
        if group.rank == 2:
            raise WorkerError("lost")
        share(group, rooms)

    monkeypatch.setattr(ProcessShardGroup, "share", leaving)
    found, _ = trial.refit(1)
    assert [type(each) for each in found] == [WorkerError] * (1 + NUM_RANKS)
