"""Records of arrays as a flat table of arrays, and back.

A token column that is one number a sequence at loss tokens, and one number elsewhere, takes one number a sequence.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from rlcore.spi import SamplingMask, TokenBatch, TurnRewards
from rlcore.spi.arrays import AnyArray, BoolArray, Int64Array, offsets_of

Table = dict[str, AnyArray]


def put_column(table: Table, name: str, column: AnyArray, offsets: Int64Array, mask: BoolArray) -> None:
    """Add a token column [T, ...], in few numbers where it has few."""
    if column.ndim == 1 and len(column) and (short := _per_sequence(column, offsets, mask)) is not None:
        table[f"{name}:sequences"], table[f"{name}:elsewhere"] = short
    else:
        table[name] = column


def take_column(table: Mapping[str, AnyArray], name: str, offsets: Int64Array, mask: BoolArray) -> AnyArray:
    """The column that `put_column` added."""
    if name in table:
        return table[name]
    return np.where(mask, np.repeat(table[f"{name}:sequences"], np.diff(offsets)), table[f"{name}:elsewhere"][0])


def _per_sequence(column: AnyArray, offsets: Int64Array, mask: BoolArray) -> tuple[AnyArray, AnyArray] | None:
    elsewhere = column[~mask][:1] if not mask.all() else np.zeros(1, column.dtype)
    firsts = np.full(len(offsets) - 1, elsewhere[0], column.dtype)
    marked = np.flatnonzero(mask)
    owners = np.searchsorted(offsets, marked, side="right") - 1
    firsts[owners[::-1]] = column[marked[::-1]]
    whole = np.where(mask, np.repeat(firsts, np.diff(offsets)), elsewhere[0])
    return (firsts, elsewhere) if whole.tobytes() == column.tobytes() else None


def put_batch(table: Table, name: str, batch: TokenBatch) -> None:
    """Add a batch."""
    table[f"{name}/tokens"], table[f"{name}/offsets"] = batch.tokens, batch.offsets
    table[f"{name}/loss_mask"] = np.packbits(batch.loss_mask)
    for key, column in batch.token_columns.items():
        put_column(table, f"{name}/tokens/{key}", column, batch.offsets, batch.loss_mask)
    for key, column in batch.sequence_columns.items():
        table[f"{name}/sequences/{key}"] = column
    if batch.sampling_mask is not None:
        table[f"{name}/kept/tokens"], table[f"{name}/kept/offsets"] = batch.sampling_mask.tokens, batch.sampling_mask.offsets
    if batch.images is not None:
        put_images(table, f"{name}/images", batch.images)


def take_batch(table: Mapping[str, AnyArray], name: str) -> TokenBatch:
    """The batch that `put_batch` added. ContractError where its arrays do not fit each other."""
    offsets, tokens = table[f"{name}/offsets"], table[f"{name}/tokens"]
    mask = np.unpackbits(table[f"{name}/loss_mask"], count=len(tokens)).astype(np.bool_)
    kept = f"{name}/kept/tokens"
    return TokenBatch(
        tokens=tokens,
        offsets=offsets,
        loss_mask=mask,
        token_columns={
            key: take_column(table, f"{name}/tokens/{key}", offsets, mask) for key in names_below(table, f"{name}/tokens/")
        },
        sequence_columns={key: table[f"{name}/sequences/{key}"] for key in names_below(table, f"{name}/sequences/")},
        sampling_mask=SamplingMask(tokens=table[kept], offsets=table[f"{name}/kept/offsets"]) if kept in table else None,
        images=take_images(table, f"{name}/images") if f"{name}/images/files" in table else None,
    )


def put_images(table: Table, name: str, images: Sequence[Sequence[bytes]]) -> None:
    """Add the files of the images of each sequence, each file once."""
    numbers = {file: number for number, file in enumerate(dict.fromkeys(file for files in images for file in files))}
    table[f"{name}/files"] = np.frombuffer(b"".join(numbers), np.uint8)
    table[f"{name}/file_offsets"] = offsets_of([len(file) for file in numbers])
    table[f"{name}/read"] = np.array([numbers[file] for files in images for file in files], np.int64)
    table[f"{name}/offsets"] = offsets_of([len(files) for files in images])


def take_images(table: Mapping[str, AnyArray], name: str) -> tuple[tuple[bytes, ...], ...]:
    """The images that `put_images` added."""
    content, places = table[f"{name}/files"].tobytes(), table[f"{name}/file_offsets"].tolist()
    files = [content[start:end] for start, end in pairwise(places)]
    read, offsets = table[f"{name}/read"].tolist(), table[f"{name}/offsets"].tolist()
    return tuple(tuple(files[one] for one in read[start:end]) for start, end in pairwise(offsets))


def put_turns(table: Table, name: str, turns: TurnRewards | None) -> None:
    """Add the rewards of turns, where there are any."""
    if turns is not None:
        table[f"{name}/rewards"], table[f"{name}/offsets"] = turns.rewards, turns.offsets
        table[f"{name}/turn_of"] = turns.turn_of
        if turns.continues is not None:
            table[f"{name}/continues"] = turns.continues


def take_turns(table: Mapping[str, AnyArray], name: str) -> TurnRewards | None:
    """The rewards that `put_turns` added."""
    if f"{name}/rewards" not in table:
        return None
    parts: dict[str, Any] = {key: table[f"{name}/{key}"] for key in ("rewards", "offsets", "turn_of")}
    parts["continues"] = table.get(f"{name}/continues")
    return TurnRewards(**parts)


def names_below(table: Mapping[str, AnyArray], prefix: str) -> list[str]:
    """The names of columns below a prefix."""
    return sorted({name.removeprefix(prefix).partition(":")[0] for name in table if name.startswith(prefix)})
