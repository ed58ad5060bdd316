"""Images that sequences of a batch or prompts of a request read."""

import pickle

import numpy as np
import pytest
from attrs import evolve

from rlcore.spi import ContractError, GenerateRequest, RaggedTokens, SamplingParams, TokenBatch


def batch(images):
    return TokenBatch(
        tokens=np.arange(6, dtype=np.int32),
        offsets=np.array([0, 2, 3, 6]),
        loss_mask=np.zeros(6, np.bool_),
        images=images,
    )


@pytest.mark.parametrize("images", [((b"a",), ()), [(b"a",), (), ()], ((b"a",), (), [b"b"]), ((b"a",), (), ("b",))])
def test_anything_but_a_tuple_of_files_for_each_sequence_is_refused(images):
    with pytest.raises(ContractError, match="images: found"):
        batch(images)


def test_images_follow_their_sequences():
    assert batch(((b"a",), (), (b"b", b"c"))).select(np.array([2, 0])).images == ((b"b", b"c"), (b"a",))
    assert batch(None).select(np.array([2, 0])).images is None


def test_a_file_that_samples_share_is_written_once():
    file = bytes(10_000)
    assert len(pickle.dumps(batch(((file,), (file,), (file,))))) < 15_000


def test_a_request_has_images_for_each_prompt():
    request = GenerateRequest(
        prompts=RaggedTokens.from_lists([[1], [2, 3]]),
        num_samples=2,
        seeds=np.zeros(4, np.int64),
        max_tokens=np.ones(4, np.int32),
        sampling=SamplingParams(),
        weight_version=0,
        images=((b"a",), ()),
    )
    with pytest.raises(ContractError, match="tuple of 2"):
        evolve(request, images=((b"a",),) * 4)
