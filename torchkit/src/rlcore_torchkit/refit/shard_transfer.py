"""Pieces of a plan from rank to rank, packed in buckets that carry their digests.

A bucket leaves its sender once, whatever the number of its receivers: each gets an equal slice, and they pass these on among
themselves.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, MutableMapping, Sequence, Set
from functools import cached_property
from itertools import accumulate
from math import prod

import torch
from attrs import frozen
from torch import Tensor

from rlcore.schema.suggestions import listed
from rlcore.spi import RefitError
from rlcore.spi.weights import TensorSpec
from rlcore_torchkit.refit.copies import copy_each
from rlcore_torchkit.refit.delta_encoding import encode, patch
from rlcore_torchkit.refit.digest import tensor_digests
from rlcore_torchkit.refit.shard_group import ShardGroup
from rlcore_torchkit.refit.shard_plan import Piece, ShardSlice

_ALIGNMENT = 16
_MAX_NAMED = 5


@frozen
class _Place:
    """A piece's place in its bucket, in the sender's part and in the receivers'. Worked out once for all refits of a plan."""

    piece: Piece
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    start: int
    """Elements of the dtype from the bucket's first byte to the piece."""
    of_held: tuple[slice, ...] | None
    """None if the piece is the whole part."""
    of_wanted: tuple[slice, ...] | None

    @classmethod
    def of(cls, piece: Piece, dtype: torch.dtype, start_bytes: int) -> "_Place":
        box, shape = piece.box, piece.box.shape
        return cls(
            piece=piece,
            dtype=dtype,
            shape=shape,
            strides=tuple(prod(shape[dim + 1 :]) for dim in range(len(shape))),
            start=start_bytes // dtype.itemsize,
            of_held=None if box == piece.held else box.within(piece.held),
            of_wanted=None if box == piece.wanted else box.within(piece.wanted),
        )

    def held_in(self, parts: Mapping[ShardSlice, Tensor]) -> Tensor:
        part = parts[self.piece.held]
        return part if self.of_held is None else part[self.of_held]

    def wanted_in(self, parts: Mapping[ShardSlice, Tensor]) -> Tensor:
        part = parts[self.piece.wanted]
        return part if self.of_wanted is None else part[self.of_wanted]


@frozen(kw_only=True, eq=False)
class Bucket:
    """Pieces of one sender for the same receivers that travel together, and behind them 8 bytes of their digest."""

    number: int
    """Its number between these."""
    sender: int
    receivers: tuple[int, ...]
    pieces: Sequence[Piece]
    dtypes: Sequence[torch.dtype]
    """The dtype of each piece."""

    @property
    def num_bytes(self) -> int:
        return self._ends[-1] + 8

    def slices(self, num_bytes: int) -> list[slice]:
        """Return the slice of a message of so many bytes that the sender gives each receiver, all equally long but the last."""
        share = self._share(num_bytes)
        return [
            slice(min(place * share, num_bytes), min((place + 1) * share, num_bytes)) for place in range(len(self.receivers))
        ]

    def room(self, num_bytes: int) -> int:
        """The bytes of such slices together, were they all of the same length."""
        return self._share(num_bytes) * len(self.receivers)

    def packed(self, read: Callable[[_Place], Tensor], device: torch.device) -> Tensor:
        """uint8 of `num_bytes`, with the digest left open."""
        buffer = torch.empty(self.num_bytes, dtype=torch.uint8, device=device)
        for gap in self._gaps:
            buffer[gap] = 0
        copy_each(self._parts(buffer), [read(place) for place in self._places])
        return buffer

    def unpack(self, buffer: Tensor, wanted: MutableMapping[ShardSlice, Tensor]) -> None:
        """Copy the pieces into the wanted parts. Parts that `wanted` lacks are added: views of the buffer if one piece each."""
        places, parts = list[Tensor](), list[Tensor]()
        for place, part in zip(self._places, self._parts(buffer), strict=True):
            box = place.piece.wanted
            if box not in wanted and place.of_wanted is None:
                wanted[box] = part
                continue
            if box not in wanted:
                wanted[box] = part.new_empty(box.shape)
            places.append(place.wanted_in(wanted))
            parts.append(part)
        copy_each(places, parts)

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

    def _parts(self, buffer: Tensor) -> list[Tensor]:
        """Views of the buffer as its pieces: each is made at once, from the buffer in its dtype."""
        whole = {dtype: buffer[:-8].view(dtype) for dtype in {*self.dtypes}}
        firsts = {dtype: view.storage_offset() for dtype, view in whole.items()}
        return [
            whole[place.dtype].as_strided(place.shape, place.strides, firsts[place.dtype] + place.start)
            for place in self._places
        ]

    @cached_property
    def _ends(self) -> list[int]:
        """The bytes up to the end of each piece, with what fills it up."""
        return list(accumulate(map(_aligned, self.pieces)))

    @cached_property
    def _places(self) -> list[_Place]:
        starts = [0, *self._ends[:-1]]
        return list(map(_Place.of, self.pieces, self.dtypes, starts))

    @cached_property
    def _gaps(self) -> list[slice]:
        """Bytes between pieces, which are zero."""
        gaps = [slice(end - _aligned(piece) + piece.num_bytes, end) for piece, end in zip(self.pieces, self._ends, strict=True)]
        return [gap for gap in gaps if gap.start < gap.stop]


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

    buckets: Sequence[Bucket]
    num_senders: int
    group: ShardGroup
    device: torch.device

    def run(
        self,
        held: Mapping[ShardSlice, Tensor],
        wanted: MutableMapping[ShardSlice, Tensor],
        *,
        last: Mapping[ShardSlice, Tensor] | None = None,
        in_step: Set[int] | None = None,
    ) -> TransferStats:
        """Send from `held`, cast to the announced dtype, and receive into `wanted`; every rank of the group calls it.

        Parts that `wanted` lacks are added. `in_step` is None on all ranks or on none. In a bucket for ranks that are all among
        the sender's `in_step` changes alone travel: to what a sender has in `last`, the boxes of its pieces, and a receiver in
        `wanted`. RefitError, once all has travelled, names what changed on the way. Of the buckets between a sender and some
        receivers one is on its way at a time.
        """
        own, moved, wrong = self.group.rank, TransferStats(digest=0), list[str]()
        mine = [bucket for bucket in self.buckets if own == bucket.sender or own in self._takers(bucket)]
        for number in range(1 + max((bucket.number for bucket in mine), default=-1)):
            at_once = [bucket for bucket in mine if bucket.number == number]
            leaving = [bucket for bucket in at_once if bucket.sender == own]
            arriving = [bucket for bucket in at_once if bucket.sender != own]
            sent, digests = self._messages(leaving, held, last, in_step)
            for bucket, message, digest in zip(leaving, sent, digests, strict=True):
                weighed = sum(bucket.weighed(digest, receiver) for receiver in bucket.receivers)
                moved += TransferStats(digest=weighed, sent_bytes=len(message))
            messages = self._exchanged(list(zip(leaving, sent, strict=True)), arriving, are_told=in_step is not None)
            for bucket, message, found in zip(arriving, messages, self._taken(arriving, messages, wanted), strict=True):
                wrong += [] if found else [f"{piece.box.name} from rank {bucket.sender}" for piece in bucket.pieces]
                moved += (found or TransferStats(digest=0)) + TransferStats(digest=0, received_bytes=len(message))
        if wrong:
            raise RefitError(f"refit: {len(wrong)} piece(s) changed on the way: {listed(wrong, _MAX_NAMED)}")
        return moved

    def _messages(
        self,
        leaving: Sequence[Bucket],
        held: Mapping[ShardSlice, Tensor],
        last: Mapping[ShardSlice, Tensor] | None,
        in_step: Set[int] | None,
    ) -> tuple[list[Tensor], list[int]]:
        """Return each bucket, or what has changed in it where that is less, sealed with the digest of the bucket, and the
        digests."""
        buffers = [bucket.packed(lambda place: place.held_in(held), self.device) for bucket in leaving]
        digests = tensor_digests(buffer[:-8] for buffer in buffers)
        for index, (bucket, digest) in enumerate(zip(leaving, digests, strict=True)):
            if last is not None and in_step is not None and in_step >= {*self._takers(bucket)}:
                before = bucket.packed(lambda place: last[place.piece.box], self.device)
                code = encode(buffers[index][:-8], before[:-8])
                if code is not None:
                    buffers[index] = torch.cat([code, code.new_empty(8)])
            buffers[index][-8:].view(torch.int64).fill_(digest - 2**64 if digest >= 2**63 else digest)
        return buffers, digests

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
        self, buckets: Sequence[Bucket], messages: Sequence[Tensor], wanted: MutableMapping[ShardSlice, Tensor]
    ) -> list[TransferStats | None]:
        """Take buckets; None for one that differs from what was sent, of which nothing is taken."""
        own = self.group.rank - self.num_senders
        wholes = [self._whole(bucket, message, wanted) for bucket, message in zip(buckets, messages, strict=True)]
        digests = tensor_digests(whole[:-8] for whole, _ in wholes)
        tails = torch.cat([whole[-8:] for whole, _ in wholes]).view(torch.int64).tolist() if wholes else []
        found = list[TransferStats | None]()
        for bucket, (whole, changed), digest, sent in zip(buckets, wholes, digests, tails, strict=True):
            if changed is None or digest != sent % 2**64:
                found.append(None)
                continue
            bucket.unpack(whole, wanted)
            found.append(TransferStats(digest=bucket.weighed(digest, own), changed=changed))
        return found

    def _whole(
        self, bucket: Bucket, message: Tensor, wanted: Mapping[ShardSlice, Tensor]
    ) -> tuple[Tensor, frozenset[ShardSlice] | None]:
        """Return a bucket from its message, which may hold changes alone, and the parts that differ from the wanted ones. These
        are None for a message that is no code of changes."""
        if len(message) == bucket.num_bytes:
            return message, frozenset(piece.wanted for piece in bucket.pieces)
        before = bucket.packed(lambda place: place.wanted_in(wanted), self.device)
        whole = before.clone()
        try:
            patch(whole[:-8], message[:-8])
        except RefitError:  # told once all has travelled: others wait for this rank
            return before, None
        whole[-8:] = message[-8:]
        return whole, bucket.changed(whole, before)


def make_bucket_list(specs: Sequence[TensorSpec], pieces: Sequence[Piece], max_bucket_bytes: int) -> tuple[Bucket, ...]:
    """The buckets of each sender for the same receivers, of at most so many bytes or with one piece that is larger."""
    dtypes: dict[str, torch.dtype] = {spec.name: getattr(torch, spec.dtype) for spec in specs}
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
        Bucket(
            number=number,
            sender=sender,
            receivers=receivers,
            pieces=tuple(run),
            dtypes=tuple(dtypes[piece.box.name] for piece in run),
        )
        for (sender, receivers), runs in between.items()
        for number, run in enumerate(runs)
    )


def _aligned(piece: Piece) -> int:
    return _round_up(piece.num_bytes)


def _round_up(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
