"""A reference that is asked while samples come in: what a batch then gets, and who is asked for what, and when."""

import threading
from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest
from attrs import evolve

from rlcore.spi import ContractError, Images, TokenBatch, WorkerError
from rlcore.spi.arrays import Float32Array, offsets_of
from rlcore_reference.ahead import ReferenceAhead

WAIT_S = 300.0


class Model:
    """The log-probability of a token is minus the sum of the tokens up to it."""

    def __init__(self) -> None:
        self.asked: list[list[list[int]]] = []
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.has_begun = threading.Event()
        self.error: BaseException | None = None

    def __call__(self, batch: TokenBatch) -> Float32Array:
        self.has_begun.set()
        assert self.may_answer.wait(WAIT_S)
        if self.error is not None:
            raise self.error
        parts = np.split(batch.tokens, batch.offsets[1:-1])
        self.asked.append([part.tolist() for part in parts])
        return np.concatenate([-np.cumsum(part) for part in parts]).astype(np.float32)


def batch_of(*sequences: list[int]) -> TokenBatch:
    tokens = np.concatenate([np.asarray(one, np.int32) for one in sequences])
    return TokenBatch(tokens=tokens, offsets=offsets_of([*map(len, sequences)]), loss_mask=np.zeros(len(tokens), bool))


def tokens(*values: int) -> np.ndarray:
    return np.asarray(values, np.int32)


@pytest.fixture
def model() -> Model:
    return Model()


@pytest.fixture
def ahead(model: Model) -> Iterator[ReferenceAhead]:
    opened = ReferenceAhead(model, keeps=1)
    yield opened
    model.may_answer.set()
    opened.close()


def test_a_batch_gets_what_it_would_have_been_answered(model: Model, ahead: ReferenceAhead) -> None:
    """Sequences that were told of and others, one of them twice, and none for those that are not asked for."""
    ahead.add(tokens(3, 4))
    batch = batch_of([1, 2, 3], [3, 4], [5], [1, 2, 3], [9, 9])
    found = ahead.logprobs(batch, np.array([0, 1, 3]))
    assert found.tolist() == [-1, -3, -6, -3, -7, 0, -1, -3, -6, 0, 0]
    assert found.dtype == np.float32
    assert sorted(sequence for asked in model.asked for sequence in asked) == [[1, 2, 3], [3, 4]]


def test_sequences_of_the_same_tokens_that_read_different_images_are_not_the_same() -> None:
    """What the reference is asked for has the images: it would answer something else without them."""
    asked: list[Images] = []

    def compute(batch: TokenBatch) -> Float32Array:
        asked.append(batch.images or ())
        return np.repeat([0.0 if not one else -float(len(one[0])) for one in batch.images or ()], 2).astype(np.float32)

    with closing(ReferenceAhead(compute, keeps=1)) as ahead:
        ahead.add(tokens(3, 4), (b"a",))
        batch = evolve(batch_of([3, 4], [3, 4], [3, 4]), images=((b"a",), (b"bb",), ()))
        assert ahead.logprobs(batch, np.arange(3)).tolist() == [-1, -1, -2, -2, 0, 0]
    assert sorted(len(images) for images in asked) in ([3], [1, 2])


def test_all_that_has_come_meanwhile_is_asked_for_at_once_and_each_only_once(model: Model, ahead: ReferenceAhead) -> None:
    model.may_answer.clear()
    ahead.add(tokens(1))
    assert model.has_begun.wait(WAIT_S)
    for values in ((2, 2), (3,), (2, 2), (1,)):
        ahead.add(tokens(*values))
    model.may_answer.set()
    assert ahead.logprobs(batch_of([3], [1], [2, 2]), np.arange(3)).tolist() == [-3, -1, -2, -4]
    assert model.asked == [[[1]], [[2, 2], [3]]]


def test_what_no_batch_asks_for_is_dropped_after_as_many_as_it_may_wait(model: Model, ahead: ReferenceAhead) -> None:
    ahead.add(tokens(7))
    for number in range(4):
        ahead.logprobs(batch_of([number]), np.arange(1))
    ahead.logprobs(batch_of([7]), np.arange(1))
    assert sum([7] in asked for asked in model.asked) == 2
    ahead.add(tokens(8))
    ahead.logprobs(batch_of([1]), np.arange(1))
    ahead.logprobs(batch_of([8]), np.arange(1))
    assert sum([8] in asked for asked in model.asked) == 1, "the batch after the next"


def test_what_the_reference_raises_ends_the_batch(model: Model, ahead: ReferenceAhead) -> None:
    model.error = WorkerError("gone")
    ahead.add(tokens(1))
    for _ in range(2):
        with pytest.raises(WorkerError, match="gone"):
            ahead.logprobs(batch_of([2]), np.arange(1))


@pytest.mark.parametrize(
    "found", [np.zeros(2, np.float32), np.zeros((3, 1), np.float32), None], ids=["short", "matrix", "none"]
)
def test_an_answer_of_another_form_ends_the_batch(found: object) -> None:
    with closing(ReferenceAhead(lambda batch: found, keeps=1)) as opened, pytest.raises((ContractError, AttributeError)):  # type: ignore[arg-type,return-value]
        opened.logprobs(batch_of([1, 2, 3]), np.arange(1))
