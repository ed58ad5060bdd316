"""Pieces of a plan from rank to rank, packed in buckets that carry their digests.

A bucket leaves its sender once, whatever the number of its receivers: each gets an equal slice, and they pass these on among
themselves.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set

import torch
from attrs import frozen
from torch import Tensor

from rlcore.schema.suggestions import listed
from rlcore.spi import RefitError
from rlcore.spi.weights import TensorSpec
from rlcore_torchkit.refit.delta_encoding import encode, patch
from rlcore_torchkit.refit.digest import tensor_digest
from rlcore_torchkit.refit.shard_group import ShardGroup
from rlcore_torchkit.refit.shard_plan import Piece, ShardSlice

_ALIGNMENT = 16
_MAX_NAMED = 5


@frozen(kw_only=True, eq=False)
class Bucket:
    """Pieces of one sender for the same receivers that travel together, and behind them 8 bytes of their digest."""

    number: int
    """Its number between these."""
    sender: int
    receivers: tuple[int, ...]
    pieces: Sequence[Piece]

    @property
    def num_bytes(self) -> int:
        return sum(map(_aligned, self.pieces)) + 8

    def slices(self, num_bytes: int) -> list[slice]:
        """Return the slice of a message of so many bytes that the sender gives each receiver, all equally long but the last."""
        share = self._share(num_bytes)
        return [
            slice(min(place * share, num_bytes), min((place + 1) * share, num_bytes)) for place in range(len(self.receivers))
        ]

    def room(self, num_bytes: int) -> int:
        """The bytes of such slices together, were they all of the same length."""
        return self._share(num_bytes) * len(self.receivers)

    def packed(self, dtypes: Mapping[str, torch.dtype], read: Callable[[Piece], Tensor], device: torch.device) -> Tensor:
        """uint8 of `num_bytes`, with the digest left open."""
        buffer, stop = torch.empty(self.num_bytes, dtype=torch.uint8, device=device), 0
        for piece, part in self._parts(buffer, dtypes):
            part.copy_(read(piece))
            stop += _aligned(piece)
            buffer[stop - _aligned(piece) + piece.num_bytes : stop] = 0
        return buffer

    def unpacked(self, buffer: Tensor, dtypes: Mapping[str, torch.dtype], wanted: Mapping[ShardSlice, Tensor]) -> int | None:
        """The digest; None, and nothing taken, where the bucket is not as it was sent."""
        digest = tensor_digest(buffer[:-8])
        if digest != int(buffer[-8:].view(torch.int64)) % 2**64:
            return None
        for piece, part in self._parts(buffer, dtypes):
            wanted[piece.wanted][piece.box.within(piece.wanted)].copy_(part)
        return digest

    def changed(self, one: Tensor, other: Tensor) -> frozenset[ShardSlice]:
        """The parts whose pieces differ between two such buffers."""
        differing, start, found = one.view(torch.int64) != other.view(torch.int64), 0, list[Tensor]()
        for piece in self.pieces:
            stop = start + _aligned(piece) // 8
            found.append(differing[start:stop].any())
            start = stop
        return frozenset(
            piece.wanted for piece, differs in zip(self.pieces, torch.stack(found).tolist(), strict=True) if differs
        )

    def weighed(self, digest: int, receiver: int) -> int:
        """Multiply the digest by an odd factor of bucket and receiver, so that sums differ where buckets or receivers are
        exchanged."""
        return digest * (2 * hash((self.sender, self.receivers, receiver, self.number)) + 1) % 2**64

    def _share(self, num_bytes: int) -> int:
        if len(self.receivers) == 1:
            return num_bytes
        return _round_up(-(-num_bytes // len(self.receivers)))

    def _parts(self, buffer: Tensor, dtypes: Mapping[str, torch.dtype]) -> Iterator[tuple[Piece, Tensor]]:
        start = 0
        for piece in self.pieces:
            yield piece, buffer[start : start + piece.num_bytes].view(dtypes[piece.box.name]).view(piece.box.shape)
            start += _aligned(piece)


@frozen(kw_only=True)
class TransferStats:
    """The bytes that one rank has sent or received, and their digest."""

    digest: int
    """The sum mod 2^64 of the weighed digests, one for each receiver; that over all senders equals that over all receivers."""
    sent_bytes: int = 0
    received_bytes: int = 0
    changed: frozenset[ShardSlice] = frozenset()
    """Wanted parts that are not as they were before."""

    def __add__(self, other: "TransferStats") -> "TransferStats":
        return TransferStats(
            digest=(self.digest + other.digest) % 2**64,
            sent_bytes=self.sent_bytes + other.sent_bytes,
            received_bytes=self.received_bytes + other.received_bytes,
            changed=self.changed | other.changed,
        )


@frozen(kw_only=True, eq=False)
class ShardTransfer:
    """Carries out a plan in a process group: first the trainer's ranks, behind them the generator's."""

    specs: Sequence[TensorSpec]
    buckets: Sequence[Bucket]
    num_senders: int
    group: ShardGroup
    device: torch.device

    def run(
        self,
        held: Mapping[ShardSlice, Tensor],
        wanted: Mapping[ShardSlice, Tensor],
        *,
        last: Mapping[ShardSlice, Tensor] | None = None,
        in_step: Set[int] | None = None,
    ) -> TransferStats:
        """Send from `held`, cast to the announced dtype, and receive into `wanted`; every rank of the group calls it.

        `in_step` is None on all of them or on none. In a bucket for ranks that are all among the sender's `in_step` changes
        alone travel: to what a sender has in `last`, the boxes of its pieces, and a receiver in `wanted`. RefitError, once all
        has travelled, names what changed on the way. Of the buckets between a sender and some receivers one is in memory at
        a time.
        """
        dtypes: dict[str, torch.dtype] = {spec.name: getattr(torch, spec.dtype) for spec in self.specs}
        own, moved, wrong = self.group.rank, TransferStats(digest=0), list[str]()
        mine = [bucket for bucket in self.buckets if own == bucket.sender or own in self._takers(bucket)]
        for number in range(1 + max((bucket.number for bucket in mine), default=-1)):
            leaving, arriving = list[tuple[Bucket, Tensor]](), list[Bucket]()
            for bucket in (bucket for bucket in mine if bucket.number == number):
                if bucket.sender == own:
                    by_changes = in_step is not None and in_step >= {*self._takers(bucket)}
                    message, digest = self._message(bucket, dtypes, held, last if by_changes else None)
                    weighed = sum(bucket.weighed(digest, receiver) for receiver in bucket.receivers)
                    moved += TransferStats(digest=weighed, sent_bytes=len(message))
                    leaving.append((bucket, message))
                else:
                    arriving.append(bucket)
            messages = self._exchanged(leaving, arriving, are_told=in_step is not None)
            for bucket, message in zip(arriving, messages, strict=True):
                found = self._taken(bucket, message, dtypes, wanted)
                wrong += [] if found else [f"{piece.box.name} from rank {bucket.sender}" for piece in bucket.pieces]
                moved += (found or TransferStats(digest=0)) + TransferStats(digest=0, received_bytes=len(message))
        if wrong:
            raise RefitError(f"refit: {len(wrong)} piece(s) changed on the way: {listed(wrong, _MAX_NAMED)}")
        return moved

    def _message(
        self,
        bucket: Bucket,
        dtypes: Mapping[str, torch.dtype],
        held: Mapping[ShardSlice, Tensor],
        last: Mapping[ShardSlice, Tensor] | None,
    ) -> tuple[Tensor, int]:
        """The bucket, or what has changed in it where that is less, sealed with the digest of the bucket, which is returned."""
        buffer = bucket.packed(dtypes, lambda piece: held[piece.held].detach()[piece.box.within(piece.held)], self.device)
        digest = tensor_digest(buffer[:-8])
        if last is not None:
            before = bucket.packed(dtypes, lambda piece: last[piece.box], self.device)
            code = encode(buffer[:-8], before[:-8])
            buffer = buffer if code is None else torch.cat([code, code.new_empty(8)])
        buffer[-8:].view(torch.int64).fill_(digest - 2**64 if digest >= 2**63 else digest)
        return buffer, digest

    def _takers(self, bucket: Bucket) -> tuple[int, ...]:
        """The bucket's receivers, as ranks of the group."""
        return tuple(self.num_senders + receiver for receiver in bucket.receivers)

    def _exchanged(
        self, leaving: Sequence[tuple[Bucket, Tensor]], arriving: Sequence[Bucket], *, are_told: bool
    ) -> Sequence[Tensor]:
        """The messages of the buckets that arrive, first a slice of each from its sender, then the others from who has them."""
        sizes = self._told_sizes(leaving, arriving) if are_told else [bucket.num_bytes for bucket in arriving]
        rooms = [
            torch.empty(bucket.room(size), dtype=torch.uint8, device=self.device)
            for bucket, size in zip(arriving, sizes, strict=True)
        ]
        sent, received = list[tuple[int, Tensor]](), list[tuple[int, Tensor]]()
        for bucket, message in leaving:
            parts = zip(self._takers(bucket), bucket.slices(len(message)), strict=True)
            sent += [(peer, message[part]) for peer, part in parts if part.start < part.stop]
        for bucket, size, room in zip(arriving, sizes, rooms, strict=True):
            part = bucket.slices(size)[self._takers(bucket).index(self.group.rank)]
            received += [(bucket.sender, room[part])] if part.start < part.stop else []
        self.group.exchange(sent, received)
        shared = [(self._takers(bucket), room) for bucket, room in zip(arriving, rooms, strict=True)]
        self.group.share([(ranks, room) for ranks, room in shared if len(ranks) > 1])
        return [room[:size] for room, size in zip(rooms, sizes, strict=True)]

    def _told_sizes(self, leaving: Sequence[tuple[Bucket, Tensor]], arriving: Sequence[Bucket]) -> list[int]:
        """Tell all receivers how long the messages are that leave, and hear it of those that arrive."""
        told = [
            (peer, torch.tensor([len(message)], device=self.device))
            for bucket, message in leaving
            for peer in self._takers(bucket)
        ]
        heard = [(bucket.sender, torch.empty(1, dtype=torch.int64, device=self.device)) for bucket in arriving]
        self.group.exchange(told, heard)
        sizes = [int(size) for _, size in heard]
        for bucket, size in zip(arriving, sizes, strict=True):
            if not 8 < size <= bucket.num_bytes:
                raise RefitError(f"refit: found {size} bytes from rank {bucket.sender}; expected {bucket.num_bytes} at most")
        return sizes

    def _taken(
        self, bucket: Bucket, message: Tensor, dtypes: Mapping[str, torch.dtype], wanted: Mapping[ShardSlice, Tensor]
    ) -> TransferStats | None:
        """Take a bucket; None, and nothing taken, if it differs from the one that was sent."""
        changed = frozenset(piece.wanted for piece in bucket.pieces)
        if len(message) < bucket.num_bytes:
            before = bucket.packed(dtypes, lambda piece: wanted[piece.wanted][piece.box.within(piece.wanted)], self.device)
            whole = before.clone()
            try:
                patch(whole[:-8], message[:-8])
            except RefitError:  # told once all has travelled: others wait for this rank
                return None
            whole[-8:] = message[-8:]
            message, changed = whole, bucket.changed(whole, before)
        digest = bucket.unpacked(message, dtypes, wanted)
        if digest is None:
            return None
        return TransferStats(digest=bucket.weighed(digest, self.group.rank - self.num_senders), changed=changed)


def make_bucket_list(pieces: Sequence[Piece], max_bucket_bytes: int) -> tuple[Bucket, ...]:
    """The buckets of each sender for the same receivers, of at most so many bytes or with one piece that is larger."""
    between: dict[tuple[int, tuple[int, ...]], list[list[Piece]]] = defaultdict(list)
    last: dict[tuple[int, tuple[int, ...]], int] = {}
    """The bytes of the last bucket so far."""
    for piece in pieces:
        pair, num_bytes = (piece.sender, piece.receivers), _aligned(piece)
        runs = between[pair]
        if not runs or last[pair] + num_bytes > max_bucket_bytes:
            runs.append([])
            last[pair] = 0
        runs[-1].append(piece)
        last[pair] += num_bytes
    return tuple(
        Bucket(number=number, sender=sender, receivers=receivers, pieces=tuple(run))
        for (sender, receivers), runs in between.items()
        for number, run in enumerate(runs)
    )


def _aligned(piece: Piece) -> int:
    return _round_up(piece.num_bytes)


def _round_up(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
