"""Pieces of a plan from rank to rank, packed in buckets that carry their digests."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import torch
from attrs import frozen
from torch import Tensor

from rlcore.schema.listing import listed
from rlcore.spi import RefitError
from rlcore.spi.weights import TensorSpec
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

    def packed(self, dtypes: Mapping[str, torch.dtype], held: Mapping[Box, Tensor], device: torch.device) -> tuple[Tensor, int]:
        """uint8 of `num_bytes`, and the digest."""
        buffer = torch.zeros(self.num_bytes, dtype=torch.uint8, device=device)
        for piece, part in self._parts(buffer, dtypes):
            part.copy_(held[piece.held].detach()[piece.box.within(piece.held)])
        digest = tensor_digest(buffer[:-8])
        buffer[-8:].view(torch.int64).fill_(digest - 2**64 if digest >= 2**63 else digest)
        return buffer, digest

    def unpacked(self, buffer: Tensor, dtypes: Mapping[str, torch.dtype], wanted: Mapping[Box, Tensor]) -> int | None:
        """The digest; None, and nothing taken, where the bucket is not as it was sent."""
        digest = tensor_digest(buffer[:-8])
        if digest != int(buffer[-8:].view(torch.int64)) % 2**64:
            return None
        for piece, part in self._parts(buffer, dtypes):
            wanted[piece.wanted][piece.box.within(piece.wanted)].copy_(part)
        return digest

    def weighed(self, digest: int) -> int:
        """The digest by an odd factor of the bucket's own, so that sums tell buckets that have changed places."""
        return digest * (2 * hash((self.sender, self.receiver, self.number)) + 1) % 2**64

    def _parts(self, buffer: Tensor, dtypes: Mapping[str, torch.dtype]) -> Iterator[tuple[Piece, Tensor]]:
        start = 0
        for piece in self.pieces:
            yield piece, buffer[start : start + piece.num_bytes].view(dtypes[piece.box.name]).view(piece.box.shape)
            start += _aligned(piece)


@frozen(kw_only=True, eq=False)
class ShardTransfer:
    """Carries out a plan in a process group: first the trainer's ranks, behind them the generator's."""

    specs: Sequence[TensorSpec]
    buckets: Sequence[Bucket]
    num_senders: int
    group: ShardGroup
    device: torch.device

    def run(self, held: Mapping[Box, Tensor], wanted: Mapping[Box, Tensor]) -> int:
        """Send from `held`, cast to the announced dtype, and receive into `wanted`; every rank of the group calls it.

        Returns the sum mod 2^64 of the weighed digests of what this rank has sent or received; the sum over all senders equals
        that over all receivers. RefitError, once all has travelled, names what changed on the way. At most one bucket for each
        peer is in memory at a time.
        """
        dtypes: dict[str, torch.dtype] = {spec.name: getattr(torch, spec.dtype) for spec in self.specs}
        own, total, changed = self.group.rank, 0, list[str]()
        mine = [bucket for bucket in self.buckets if own in (bucket.sender, self.num_senders + bucket.receiver)]
        for number in range(1 + max((bucket.number for bucket in mine), default=-1)):
            leaving, arriving = list[tuple[int, Tensor]](), list[tuple[Bucket, Tensor]]()
            for bucket in (bucket for bucket in mine if bucket.number == number):
                if bucket.sender == own:
                    buffer, digest = bucket.packed(dtypes, held, self.device)
                    total += bucket.weighed(digest)
                    leaving.append((self.num_senders + bucket.receiver, buffer))
                else:
                    buffer = torch.empty(bucket.num_bytes, dtype=torch.uint8, device=self.device)
                    arriving.append((bucket, buffer))
            self.group.exchange(leaving, [(bucket.sender, buffer) for bucket, buffer in arriving])
            for bucket, buffer in arriving:
                found = bucket.unpacked(buffer, dtypes, wanted)
                if found is None:
                    changed += [f"{piece.box.name} from rank {bucket.sender}" for piece in bucket.pieces]
                else:
                    total += bucket.weighed(found)
        if changed:
            raise RefitError(f"refit: {len(changed)} piece(s) changed on the way: {listed(changed, _MAX_NAMED)}")
        return total % 2**64


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
