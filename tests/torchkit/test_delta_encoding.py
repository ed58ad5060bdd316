"""Codes of changes, put into what was there before."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlcore.spi import RefitError
from rlcore_torchkit.refit import delta_encoding
from rlcore_torchkit.refit.delta_encoding import encode, patch


def buffer_of(num_words: int, seed: int) -> Tensor:
    return torch.randint(256, (2 * num_words,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def changed_in(old: Tensor, places: Tensor) -> Tensor:
    new = old.clone()
    new.view(torch.int16)[places] += 1
    return new


@settings(max_examples=60, deadline=None)
@given(num_words=st.integers(1, 40).map(lambda octets: 8 * octets), seed=st.integers(0, 99), data=st.data())
def test_what_is_patched_is_what_was_encoded(num_words: int, seed: int, data: st.DataObject) -> None:
    """Any words of small buffers, with strides and chunks that these reach."""
    places = data.draw(st.lists(st.integers(0, num_words - 1), unique=True))
    old = buffer_of(num_words, seed)
    new = changed_in(old, torch.tensor(places, dtype=torch.int64))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(delta_encoding, "STRIDE", data.draw(st.sampled_from([2, 8, 2**16])))
        patched.setattr(delta_encoding, "CHUNK_WORDS", data.draw(st.sampled_from([8, 24, 2**22])))
        code = encode(new, old)
        if code is None:
            assert 4 * len(places) + 16 > num_words / 4, "so few changes are shorter than the whole"
            return
        assert len(code) % 8 == 0
        assert len(code) < len(new)
        found = old.clone()
        patch(found, code)
    assert torch.equal(found, new)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_bits_are_compared_and_not_values(dtype: torch.dtype) -> None:
    """NaN is unlike itself, and the two zeros are alike, as values."""
    nan = torch.full((8192,), float("nan"), dtype=dtype)
    zeros = torch.zeros(8192, dtype=dtype)
    old = torch.cat([nan, zeros]).view(torch.uint8)
    same = encode(old.clone(), old)
    assert same is not None
    assert len(same) == 16, "no word"
    new = old.clone()
    new.view(dtype)[8200] = -0.0
    new[0] ^= 1  # another NaN
    code, found = encode(new, old), old.clone()
    assert code is not None
    assert len(code) < 64
    patch(found, code)
    assert torch.equal(found, new)


@pytest.mark.parametrize(("share", "most"), [(0.0, 0.0001), (0.001, 0.0025), (0.01, 0.021), (0.1, 0.163), (0.5, 0.563)])
def test_a_code_is_as_small_as_it_can_be(share: float, most: float) -> None:
    """Against the buffer; of gaps larger than two bytes too, and over several chunks."""
    num_words = 2**23 + 24
    chosen = torch.rand(num_words, generator=torch.Generator().manual_seed(1)) < share
    old = buffer_of(num_words, 0)
    new = changed_in(old, chosen.nonzero().view(-1))
    code = encode(new, old)
    assert code is not None
    assert len(code) <= most * len(new)
    patch(old, code)
    assert torch.equal(old, new)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("share", [0.001, 0.2])
def test_a_gpu_makes_and_takes_the_same_codes(share: float) -> None:
    num_words = 2**23 + 24
    old = buffer_of(num_words, 0)
    new = changed_in(old, (torch.rand(num_words, generator=torch.Generator().manual_seed(1)) < share).nonzero().view(-1))
    expected, code = encode(new, old), encode(new.cuda(), old.cuda())
    assert expected is not None
    assert code is not None
    assert torch.equal(code.cpu(), expected)
    found = old.cuda()
    patch(found, code)
    assert torch.equal(found.cpu(), new)


def test_a_gap_of_more_than_two_bytes() -> None:
    old = buffer_of(2**18, 0)
    for places in ([2**18 - 1], [0, 2**17 + 5], [5, 5 + 2**16, 6 + 2**17]):
        new, found = changed_in(old, torch.tensor(places)), old.clone()
        code = encode(new, old)
        assert code is not None
        assert len(code) < 64
        patch(found, code)
        assert torch.equal(found, new)


def test_where_most_has_changed_there_is_no_code() -> None:
    old = buffer_of(800, 0)
    assert encode(changed_in(old, torch.arange(760)), old) is None


def test_what_is_no_code_of_the_buffer_is_refused() -> None:
    old = buffer_of(64, 0)
    few, many = (encode(changed_in(old, torch.arange(count)), old) for count in (1, 30))
    assert few is not None
    assert many is not None
    for code, wrong in ((few, few[:-8]), (many, many[:-8]), (few, torch.cat([few, few[:8]]))):
        with pytest.raises(RefitError, match="expected a code"):
            patch(old.clone(), wrong)
        patch(old.clone(), code)
    far = few.clone()
    far[16:18] = 255
    with pytest.raises(RefitError, match="word 65535; expected one of 64"):
        patch(old.clone(), far)
    one_more = many.clone()
    one_more[16 + 7] = 255
    with pytest.raises(RefitError, match="found 38 changed words; expected 30"):
        patch(old.clone(), one_more)
