"""The records of an offline run: the package's own protobuf messages, in a log of LevelDB's form behind seven bytes."""

import struct
from collections.abc import Iterator
from pathlib import Path

from wandb.proto import wandb_internal_pb2

BLOCK, HEADER = 32768, 7


def records(path: Path) -> Iterator[wandb_internal_pb2.Record]:
    """Each record, put together from its parts."""
    data, at, part = path.read_bytes(), HEADER, b""
    while at + HEADER <= len(data):
        if BLOCK - at % BLOCK < HEADER:
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        if at + HEADER + length > len(data):
            return  # still being written
        part += data[at + HEADER : at + HEADER + length]
        at += HEADER + length
        if kind in (1, 4):  # a whole record, or its last part
            yield wandb_internal_pb2.Record.FromString(part)
            part = b""
