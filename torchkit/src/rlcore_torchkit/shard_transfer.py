"""Pieces of a plan from rank to rank, packed in buckets that carry their digests."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set

import torch
from attrs import frozen
from torch import Tensor

from rlcore.schema.listing import listed
from rlcore.spi import RefitError
from rlcore.spi.weights import TensorSpec
from rlcore_torchkit.changed_words import encode, patch
from rlcore_torchkit.digest import tensor_digest
from rlcore_torchkit.shard_group import ShardGroup
from rlcore_torchkit.shard_plan import Box, Piece

_ALIGNMENT = 16
_MAX_NAMED = 5


@frozen(kw_only=True, eq=False)
class Bucket:
    """Pieces of one sender for one receiver that travel together, and behind them 8 bytes of their digest."""

    number: int
    """Its number between the two."""
    sender: int
    receiver: int
    pieces: Sequence[Piece]

    @property
    def num_bytes(self) -> int:
        return sum(map(_aligned, self.pieces)) + 8

    def packed(self, dtypes: Mapping[str, torch.dtype], read: Callable[[Piece], Tensor], device: torch.device) -> Tensor:
        """uint8 of `num_bytes`, with the digest left open."""
        buffer, stop = torch.empty(self.num_bytes, dtype=torch.uint8, device=device), 0
        for piece, part in self._parts(buffer, dtypes):
            part.copy_(read(piece))
            stop += _aligned(piece)
            buffer[stop - _aligned(piece) + piece.num_bytes : stop] = 0
        return buffer

    def unpacked(self, buffer: Tensor, dtypes: Mapping[str, torch.dtype], wanted: Mapping[Box, Tensor]) -> int | None:
        """The digest; None, and nothing taken, where the bucket is not as it was sent."""
        digest = tensor_digest(buffer[:-8])
        if digest != int(buffer[-8:].view(torch.int64)) % 2**64:
            return None
        for piece, part in self._parts(buffer, dtypes):
            wanted[piece.wanted][piece.box.within(piece.wanted)].copy_(part)
        return digest

    def changed(self, one: Tensor, other: Tensor) -> frozenset[Box]:
        """The parts whose pieces differ between two such buffers."""
        differing, start, found = one.view(torch.int64) != other.view(torch.int64), 0, list[Tensor]()
        for piece in self.pieces:
            stop = start + _aligned(piece) // 8
            found.append(differing[start:stop].any())
            start = stop
        return frozenset(
            piece.wanted for piece, differs in zip(self.pieces, torch.stack(found).tolist(), strict=True) if differs
        )

    def weighed(self, digest: int) -> int:
        """The digest by an odd factor of the bucket's own, so that sums tell buckets that have changed places."""
        return digest * (2 * hash((self.sender, self.receiver, self.number)) + 1) % 2**64

    def _parts(self, buffer: Tensor, dtypes: Mapping[str, torch.dtype]) -> Iterator[tuple[Piece, Tensor]]:
        start = 0
        for piece in self.pieces:
            yield piece, buffer[start : start + piece.num_bytes].view(dtypes[piece.box.name]).view(piece.box.shape)
            start += _aligned(piece)


@frozen(kw_only=True)
class Moved:
    """What one rank has sent or taken."""

    digest: int
    """The sum mod 2^64 of the weighed digests; that over all senders equals that over all receivers."""
    sent_bytes: int = 0
    changed: frozenset[Box] = frozenset()
    """Wanted parts that are not as they were before."""

    def __add__(self, other: "Moved") -> "Moved":
        return Moved(
            digest=(self.digest + other.digest) % 2**64,
            sent_bytes=self.sent_bytes + other.sent_bytes,
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
        held: Mapping[Box, Tensor],
        wanted: Mapping[Box, Tensor],
        *,
        last: Mapping[Box, Tensor] | None = None,
        in_step: Set[int] = frozenset(),
    ) -> Moved:
        """Send from `held`, cast to the announced dtype, and receive into `wanted`; every rank of the group calls it.

        With the ranks `in_step`, which a sender and a receiver say of each other, changes alone travel: to what a sender has
        in `last`, the boxes of its pieces, and a receiver in `wanted`. RefitError, once all has travelled, names what changed
        on the way. At most one bucket for each peer is in memory at a time.
        """
        dtypes: dict[str, torch.dtype] = {spec.name: getattr(torch, spec.dtype) for spec in self.specs}
        own, moved, wrong = self.group.rank, Moved(digest=0), list[str]()
        mine = [bucket for bucket in self.buckets if own in (bucket.sender, self.num_senders + bucket.receiver)]
        for number in range(1 + max((bucket.number for bucket in mine), default=-1)):
            leaving, arriving = list[tuple[int, Tensor]](), list[Bucket]()
            for bucket in (bucket for bucket in mine if bucket.number == number):
                if bucket.sender == own:
                    peer = self.num_senders + bucket.receiver
                    message, digest = self._message(bucket, dtypes, held, last if peer in in_step else None)
                    moved += Moved(digest=bucket.weighed(digest), sent_bytes=len(message))
                    leaving.append((peer, message))
                else:
                    arriving.append(bucket)
            messages = self._exchanged(leaving, arriving, in_step)
            for bucket, message in zip(arriving, messages, strict=True):
                found = self._taken(bucket, message, dtypes, wanted)
                wrong += [] if found else [f"{piece.box.name} from rank {bucket.sender}" for piece in bucket.pieces]
                moved += found or Moved(digest=0)
        if wrong:
            raise RefitError(f"refit: {len(wrong)} piece(s) changed on the way: {listed(wrong, _MAX_NAMED)}")
        return moved

    def _message(
        self, bucket: Bucket, dtypes: Mapping[str, torch.dtype], held: Mapping[Box, Tensor], last: Mapping[Box, Tensor] | None
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

    def _exchanged(
        self, leaving: Sequence[tuple[int, Tensor]], arriving: Sequence[Bucket], in_step: Set[int]
    ) -> Sequence[Tensor]:
        """The messages of the buckets that arrive; ranks in step tell each other first how long theirs are."""
        sizes = {bucket.sender: torch.empty(1, dtype=torch.int64, device=self.device) for bucket in arriving}
        told = [(peer, torch.tensor([len(message)], device=self.device)) for peer, message in leaving if peer in in_step]
        heard = [(peer, size) for peer, size in sizes.items() if peer in in_step]
        if told or heard:
            self.group.exchange(told, heard)
        messages = []
        for bucket in arriving:
            size = int(sizes[bucket.sender]) if bucket.sender in in_step else bucket.num_bytes
            if not 8 < size <= bucket.num_bytes:
                raise RefitError(f"refit: found {size} bytes from rank {bucket.sender}; expected {bucket.num_bytes} at most")
            messages.append(torch.empty(size, dtype=torch.uint8, device=self.device))
        self.group.exchange(leaving, [(bucket.sender, message) for bucket, message in zip(arriving, messages, strict=True)])
        return messages

    def _taken(
        self, bucket: Bucket, message: Tensor, dtypes: Mapping[str, torch.dtype], wanted: Mapping[Box, Tensor]
    ) -> Moved | None:
        """None, and nothing taken, where the bucket is not as it was sent."""
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
        return Moved(digest=bucket.weighed(digest), changed=changed)


def make_bucket_list(pieces: Sequence[Piece], max_bucket_bytes: int) -> tuple[Bucket, ...]:
    """The buckets between each two ranks, of at most so many bytes or with one piece that is larger."""
    between: dict[tuple[int, int], list[list[Piece]]] = defaultdict(list)
    for piece in pieces:
        runs = between[piece.sender, piece.receiver]
        if not runs or sum(map(_aligned, runs[-1])) + _aligned(piece) > max_bucket_bytes:
            runs.append([])
        runs[-1].append(piece)
    return tuple(
        Bucket(number=number, sender=sender, receiver=receiver, pieces=tuple(run))
        for (sender, receiver), runs in between.items()
        for number, run in enumerate(runs)
    )


def _aligned(piece: Piece) -> int:
    return -(-piece.num_bytes // _ALIGNMENT) * _ALIGNMENT
