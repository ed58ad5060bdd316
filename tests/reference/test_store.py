"""The reference's log-probabilities are computed once for each sequence, whatever comes between."""

import sqlite3
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.spi import StorageError, TokenBatch
from rlcore.spi.arrays import offsets_of
from rlcore_reference.store import FILE, ReferenceStore


def batch_of(sequences: list[list[int]]) -> TokenBatch:
    tokens = np.asarray([*chain.from_iterable(sequences)], np.int32)
    return TokenBatch(
        tokens=tokens, offsets=offsets_of([len(one) for one in sequences]), loss_mask=np.zeros(len(tokens), np.bool_)
    )


class Counting:
    """Values that tell which token they are of and in which call they were computed."""

    def __init__(self) -> None:
        self.asked: list[list[list[int]]] = []

    def of(self, batch: TokenBatch):  # type: ignore[no-untyped-def]
        def compute(numbers):  # type: ignore[no-untyped-def]
            self.asked.append([batch.tokens[batch.offsets[n] : batch.offsets[n + 1]].tolist() for n in numbers])
            values = np.zeros(batch.num_tokens, np.float32)
            for n in numbers:
                values[batch.offsets[n] : batch.offsets[n + 1]] = -batch.tokens[batch.offsets[n] : batch.offsets[n + 1]] / 7
            return values

        return compute


def look_up(directory: Path, sequences: list[list[int]], counting: Counting, identity: str = "a") -> np.ndarray:
    notes: list[str] = []
    batch = batch_of(sequences)
    with ReferenceStore.open(directory, identity, notes.append) as store:
        found = store.logprobs(batch, counting.of(batch))
    counting.notes = notes  # type: ignore[attr-defined]
    return found


sequences = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3), min_size=1, max_size=6)


@settings(max_examples=20, deadline=None)
@given(steps=st.lists(sequences, min_size=1, max_size=4))
def test_each_sequence_is_computed_once_over_steps_and_processes(
    tmp_path_factory: pytest.TempPathFactory, steps: list[list[list[int]]]
) -> None:
    directory, counting = tmp_path_factory.mktemp("run"), Counting()
    for step in steps:
        found = look_up(directory, step, counting)
        np.testing.assert_array_equal(found, -np.asarray([*chain.from_iterable(step)], np.float32) / np.float32(7))
    asked = [tuple(tokens) for call in counting.asked for tokens in call]
    assert sorted(asked) == sorted({tuple(tokens) for step in steps for tokens in step})


def test_a_sequence_with_other_images_is_another(tmp_path: Path) -> None:
    counting, texts = Counting(), batch_of([[1, 2]] * 3)
    batches = [texts, evolve(texts, images=((), (b"a",), (b"b",))), evolve(texts, images=((b"b",), (b"a", b"b"), (b"b", b"a")))]
    for batch in batches:
        with ReferenceStore.open(tmp_path, "a", print) as store:
            store.logprobs(batch, counting.of(batch))
    assert [len(call) for call in counting.asked] == [1, 2, 2]


def test_another_model_finds_nothing_and_says_so(tmp_path: Path) -> None:
    counting = Counting()
    look_up(tmp_path, [[1, 2]], counting)
    look_up(tmp_path, [[1, 2]], counting, identity="b")
    assert len(counting.asked) == 2
    assert "of another model or trainer" in counting.notes[0]  # type: ignore[attr-defined]
    look_up(tmp_path, [[1, 2]], counting, identity="b")
    assert len(counting.asked) == 2


@pytest.mark.parametrize("content", [b"no data base, but text that is longer than a header" * 9, None])
def test_a_damaged_file_is_begun_anew(tmp_path: Path, content: bytes | None) -> None:
    counting = Counting()
    look_up(tmp_path, [[n, n + 1, 5] for n in range(2000)], counting)
    path = tmp_path / FILE
    path.write_bytes(path.read_bytes()[:-5000] if content is None else content)
    found = look_up(tmp_path, [[1, 2, 5]], counting)
    np.testing.assert_array_equal(found, np.asarray([-1, -2, -5], np.float32) / np.float32(7))
    assert "is damaged" in counting.notes[0]  # type: ignore[attr-defined]
    assert counting.asked[-1] == [[1, 2, 5]]


def test_a_value_that_is_not_what_was_written_is_computed_again(tmp_path: Path) -> None:
    counting = Counting()
    look_up(tmp_path, [[1, 2], [3]], counting)
    with sqlite3.connect(tmp_path / FILE) as connection:
        connection.execute("update logprobs set value = zeroblob(length(value)) where length(value) = 8")
    connection.close()
    found = look_up(tmp_path, [[1, 2], [3]], counting)
    np.testing.assert_array_equal(found, np.asarray([-1, -2, -3], np.float32) / np.float32(7))
    assert counting.asked[1:] == [[[1, 2]]]


def test_a_file_that_cannot_be_written_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / FILE).mkdir()
    with pytest.raises(StorageError, match="Make room, or remove"):
        look_up(tmp_path, [[1]], Counting())
