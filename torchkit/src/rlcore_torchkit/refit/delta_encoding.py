"""Encodes the changes of a buffer since its last transfer: positions and new values of two-byte words.

A code is int64 [2], the kind and the number of words; behind it which words, and their values, each filled up to 8 bytes.
Words are named by the gaps between them, 2 bytes each, or by a bit for every word of the buffer, whichever is smaller.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from rlcore.spi import RefitError

_GAPS, _BITS = 0, 1
STRIDE = 2**16
"""Every such word is named in gaps, changed or not, so that no gap is larger than two bytes tell."""
CHUNK_WORDS = 2**22
"""Words whose places are looked up at a time: each is an int64."""
_TO_BYTE = 0x0102040810204080
"""By which 8 bytes of 0 or 1, as a little-endian int64, are multiplied to have them as the bits of the highest byte."""


def encode(new: Tensor, old: Tensor) -> Tensor | None:
    """Encode the words of `new`, uint8 [a multiple of 16], that differ from `old`: uint8 [a multiple of 8], or None where that
    is no smaller than `new`."""
    words, changed = new.view(torch.int16), new.view(torch.int16) != old.view(torch.int16)
    count = int(torch.count_nonzero(changed))
    bits_bytes = _padded(-(-len(words) // 8))
    by_gaps = 2 * (count + len(words) // STRIDE) < bits_bytes
    if 16 + (2 * count if by_gaps else bits_bytes) + 2 * count >= new.nbytes:
        return None
    if by_gaps and count:
        changed[::STRIDE] = True
    found = torch.cat([part.nonzero().view(-1) + start for start, _, part in _chunks(changed)]) if by_gaps else None
    places = _bits(changed) if found is None else _gaps(found)
    values = torch.cat([words[start:stop][part] for start, stop, part in _chunks(changed)]) if found is None else words[found]
    code = torch.cat(
        [_bytes(torch.tensor([_GAPS if by_gaps else _BITS, len(values)], device=new.device)), places, _bytes(values)]
    )
    return code if len(code) < len(new) else None


def patch(buffer: Tensor, code: Tensor) -> None:
    """Put the words of a code into the buffer. RefitError where it is no code of such a buffer."""
    words = buffer.view(torch.int16)
    kind, count = code[:16].view(torch.int64).tolist()
    places_bytes = _padded(2 * count if kind == _GAPS else -(-len(words) // 8))
    if kind not in (_GAPS, _BITS) or not 0 <= count <= len(words) or len(code) != 16 + places_bytes + _padded(2 * count):
        raise RefitError(f"refit: found {len(code)} bytes of kind {kind} for {count} changed words; expected a code of these")
    places, values = code[16 : 16 + places_bytes], code[16 + places_bytes :].view(torch.int16)[:count]
    if kind == _GAPS:
        _patch_gaps(words, places.view(torch.int16)[:count], values)
    else:
        _patch_bits(words, places, values)


def _gaps(found: Tensor) -> Tensor:
    """uint8: the distance of each place from the one before, less 1."""
    before = torch.cat([found.new_full((1,), -1), found[:-1]]) if len(found) else found
    return _bytes((found - before - 1).to(torch.int16))


def _patch_gaps(words: Tensor, gaps: Tensor, values: Tensor) -> None:
    places = ((gaps.long() & (STRIDE - 1)) + 1).cumsum(0) - 1
    if len(places) and int(places[-1]) >= len(words):
        raise RefitError(f"refit: found a change of word {int(places[-1])}; expected one of {len(words)}")
    words[places] = values


def _bits(changed: Tensor) -> Tensor:
    """uint8: bit b of byte n is word 8 n + b."""
    octets = torch.nn.functional.pad(changed, (0, -len(changed) % 8)).view(torch.int64)
    return _bytes(((octets * _TO_BYTE) >> 56).to(torch.uint8))


def _patch_bits(words: Tensor, bits: Tensor, values: Tensor) -> None:
    shifts = torch.arange(8, device=bits.device, dtype=torch.uint8)
    changed = ((bits.view(-1, 1) >> shifts) & 1).view(-1)[: len(words)].bool()
    if (count := int(torch.count_nonzero(changed))) != len(values):
        raise RefitError(f"refit: found {count} changed words; expected {len(values)}")
    first = 0
    for start, stop, part in _chunks(changed):
        places = part.nonzero().view(-1)
        words[start:stop][places] = values[first : first + len(places)]
        first += len(places)


def _chunks(changed: Tensor) -> Iterator[tuple[int, int, Tensor]]:
    for start in range(0, max(len(changed), 1), CHUNK_WORDS):
        part = changed[start : start + CHUNK_WORDS]
        yield start, start + len(part), part


def _bytes(tensor: Tensor) -> Tensor:
    """uint8, filled up to a multiple of 8."""
    raw = tensor.contiguous().view(torch.uint8)
    return torch.nn.functional.pad(raw, (0, -len(raw) % 8))


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // 8) * 8
