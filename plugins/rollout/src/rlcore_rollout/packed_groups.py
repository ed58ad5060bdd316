"""Columns of groups that have ended, as one collector packs them, and several of these as the batch of a step."""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import TypeAlias, overload

import numpy as np
from attrs import evolve, frozen
from numpy.typing import NDArray

from rlcore.run.protocols import CollectedRollouts
from rlcore.spi import (
    EPISODE_IDS,
    GROUP_IDS,
    ROUTED_EXPERTS,
    WEIGHT_VERSIONS,
    FinishReason,
    SamplingMask,
    TokenBatch,
    TurnRewards,
)
from rlcore.spi.arrays import AnyArray, Float32Array, Int32Array, Int64Array, UInt8Array, offsets_of, take_rows
from rlcore_rollout.episode import NOT_GENERATED

_COLUMNS = ("rewards", "valid", "finish_reasons", "success", "num_generated", "failed", "truncated", "timed_out")
"""Arrays of CollectedRollouts with an element for each sequence."""
Reported: TypeAlias = Mapping[str, tuple[NDArray[np.float64], Int32Array]]
"""Metrics by name: the numbers of valid episodes, float64 [M], and the group of each."""


@frozen(kw_only=True, eq=False)
class PackedGroups:
    """Groups of one collector, adjacent."""

    rollouts: CollectedRollouts
    """Their samples, without the metrics of their environment, and without what the data knows of them. Groups count from 0."""
    reported: Reported


class Texts(Sequence[str]):
    """N texts in one array, which travels without a Python object for each."""

    def __init__(self, texts: Sequence[str]) -> None:
        encoded = [text.encode(errors="surrogatepass") for text in texts]
        self._offsets = offsets_of(list(map(len, encoded)))
        self._data: UInt8Array = np.frombuffer(b"".join(encoded), np.uint8)

    def __len__(self) -> int:
        return len(self._offsets) - 1

    @overload
    def __getitem__(self, place: int) -> str: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[str]: ...
    def __getitem__(self, place: int | slice) -> str | Sequence[str]:
        if isinstance(place, slice):
            return [self[number] for number in range(*place.indices(len(self)))]
        number = range(len(self))[place]
        return self._data[self._offsets[number] : self._offsets[number + 1]].tobytes().decode(errors="surrogatepass")


class _Chained(Sequence[str]):
    """Sequences one after another."""

    def __init__(self, parts: Sequence[Sequence[str]]) -> None:
        self._parts = parts
        self._offsets = offsets_of(list(map(len, parts)))

    def __len__(self) -> int:
        return int(self._offsets[-1])

    @overload
    def __getitem__(self, place: int) -> str: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[str]: ...
    def __getitem__(self, place: int | slice) -> str | Sequence[str]:
        if isinstance(place, slice):
            return [self[number] for number in range(*place.indices(len(self)))]
        number = range(len(self))[place]
        part = int(np.searchsorted(self._offsets, number, "right")) - 1
        return self._parts[part][number - int(self._offsets[part])]


def joined(parts: Sequence[PackedGroups], numbers: Sequence[Sequence[int]]) -> CollectedRollouts:
    """Return the samples of all parts, given the numbers of each part's groups, ascending: groups ascend in the batch, too. The
    columns of several parts are copied once, and once more where their groups lie between each other; those of one part are
    not copied."""
    flat = np.array(list(chain.from_iterable(numbers)), np.int64)
    place = np.empty(len(flat), np.int64)
    place[np.argsort(flat)] = np.arange(len(flat))
    firsts = offsets_of(list(map(len, numbers)))[:-1].tolist()
    whole = parts[0].rollouts if len(parts) == 1 else _concatenated([part.rollouts for part in parts], firsts)
    if (np.diff(place) < 0).any():
        whole = _ordered(whole, place[whole.group_ids])
    metrics = {}
    for name in dict.fromkeys(chain.from_iterable(part.reported for part in parts)):
        found = [(*part.reported[name], first) for part, first in zip(parts, firsts, strict=True) if name in part.reported]
        groups = place[np.concatenate([groups + first for _, groups, first in found])]
        values = np.concatenate([values for values, _, _ in found])[np.argsort(groups, kind="stable")]
        metrics[name] = float(values.mean()) if len(values) else 0.0
    return evolve(whole, environment_metrics=metrics)


def _concatenated(parts: Sequence[CollectedRollouts], firsts: Sequence[int]) -> CollectedRollouts:
    """Return the sequences of parts one after another; `firsts` are the numbers of their first groups."""
    columns = {name: np.concatenate([getattr(part, name) for part in parts]) for name in _COLUMNS}
    return CollectedRollouts(
        batch=_batch(parts, firsts),
        reward_components=_components(parts),
        responses=_Chained([part.responses for part in parts]),
        failures=list(chain.from_iterable(part.failures for part in parts)),
        turns=_turns(parts) if any(part.turns is not None for part in parts) else None,
        **columns,
    )


def _batch(parts: Sequence[CollectedRollouts], firsts: Sequence[int]) -> TokenBatch:
    batches = [part.batch for part in parts]
    columns = {GROUP_IDS: np.concatenate([part.group_ids + np.int32(first) for part, first in zip(parts, firsts, strict=True)])}
    if any(EPISODE_IDS in batch.sequence_columns for batch in batches):
        episodes = offsets_of([len(part.first_sequences) for part in parts])[:-1].tolist()
        shifted = [(part.episode_of + first).astype(np.int32) for part, first in zip(parts, episodes, strict=True)]
        columns[EPISODE_IDS] = np.concatenate(shifted)
    masks = [batch.sampling_mask for batch in batches if batch.sampling_mask is not None]
    has_images = any(batch.images is not None for batch in batches)
    names = dict.fromkeys(chain.from_iterable(batch.token_columns for batch in batches))
    return TokenBatch(
        tokens=np.concatenate([batch.tokens for batch in batches]),
        offsets=offsets_of(np.concatenate([batch.lengths for batch in batches])),
        loss_mask=np.concatenate([batch.loss_mask for batch in batches]),
        token_columns={name: np.concatenate(_token_column(batches, name)) for name in names},
        sequence_columns=columns,
        sampling_mask=SamplingMask.join(masks) if masks else None,
        images=tuple(chain.from_iterable(batch.images or ((),) * batch.num_sequences for batch in batches))
        if has_images
        else None,
    )


def _token_column(batches: Sequence[TokenBatch], name: str) -> list[AnyArray]:
    """Return a column of each batch; where one has none, no expert is known of any token."""
    found = [batch.token_columns.get(name) for batch in batches]
    like = next(column for column in found if column is not None)
    assert name == ROUTED_EXPERTS or all(column is not None for column in found), name
    return [
        np.full((batch.num_tokens, *like.shape[1:]), -1, like.dtype) if column is None else column
        for batch, column in zip(batches, found, strict=True)
    ]


def _components(parts: Sequence[CollectedRollouts]) -> dict[str, Float32Array]:
    """Return the reward's parts by name, sorted; 0.0 in a collector's samples without such a part."""
    names = sorted(set(chain.from_iterable(part.reward_components for part in parts)))
    return {
        name: np.concatenate([part.reward_components.get(name, np.zeros(len(part.rewards), np.float32)) for part in parts])
        for name in names
    }


def _turns(parts: Sequence[CollectedRollouts]) -> TurnRewards:
    turns = [part.turns or _one_turn(part) for part in parts]
    has_parts = any(one.continues is not None for one in turns)
    continues = [np.zeros(len(one.rewards), np.bool_) if one.continues is None else one.continues for one in turns]
    return TurnRewards(
        rewards=np.concatenate([one.rewards for one in turns]),
        offsets=offsets_of(np.concatenate([np.diff(one.offsets) for one in turns])),
        turn_of=np.concatenate([one.turn_of for one in turns]),
        continues=np.concatenate(continues) if has_parts else None,
    )


def _one_turn(part: CollectedRollouts) -> TurnRewards:
    """Return the turns of episodes that have one each, or none where the environment failed before."""
    first = part.first_sequences
    has_turn = part.finish_reasons[first] != FinishReason.ABORTED
    is_generated = part.batch.token_columns[WEIGHT_VERSIONS] != NOT_GENERATED
    return TurnRewards(
        rewards=part.rewards[first][has_turn],
        offsets=offsets_of(has_turn.astype(np.int64)),
        turn_of=np.where(is_generated, np.int32(0), np.int32(-1)),
    )


def _ordered(whole: CollectedRollouts, group_ids: Int64Array) -> CollectedRollouts:
    """Return the samples by group; `group_ids`, [N], are the places of their groups."""
    order, episode_of = np.argsort(group_ids, kind="stable"), whole.episode_of
    episodes = episode_of[order][np.diff(episode_of[order], prepend=-1) != 0]
    batch, turns = whole.batch.select(order), whole.turns
    columns = {GROUP_IDS: group_ids[order].astype(np.int32)}
    if EPISODE_IDS in batch.sequence_columns:
        columns[EPISODE_IDS] = (np.cumsum(np.diff(episode_of[order], prepend=-1) != 0) - 1).astype(np.int32)
    if turns is not None:
        turns = TurnRewards(
            rewards=take_rows(turns.rewards, turns.offsets, episodes),
            offsets=offsets_of(np.diff(turns.offsets)[episodes]),
            turn_of=take_rows(turns.turn_of, whole.batch.offsets, order),
            continues=None if turns.continues is None else take_rows(turns.continues, turns.offsets, episodes),
        )
    return evolve(
        whole,
        batch=evolve(batch, sequence_columns=columns),
        turns=turns,
        reward_components={name: column[order] for name, column in whole.reward_components.items()},
        responses=[whole.responses[number] for number in order.tolist()],
        failures=[whole.failures[number] for number in episodes.tolist()],
        **{name: getattr(whole, name)[order] for name in _COLUMNS},
    )
