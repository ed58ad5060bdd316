"""Attention and rotary angles of packed sequences in Megatron's layers, against float64 sequence by sequence."""

import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from fake_ranks import on_rank
from megatron.core.transformer.enums import AttnMaskType
from megatron_families import make_own
from megatron_support import OPTIMIZER, TEMPERATURE, Reference, make_backend, make_batch

from rlcore.spi import CloseRequest, ContractError, LogprobsRequest
from rlcore_megatron.modules.attention import PackedAttention, PackedRotary
from rlcore_megatron.modules.packing import ForwardOptions, pack
from rlcore_torchkit.trainer.microbatch import move

NUM_HEADS, NUM_KV_HEADS, WIDTH = 4, 2, 8


@pytest.fixture
def packed():
    with on_rank(0, 1):
        batch = move(make_batch(), torch.device("cpu"), ())
        yield pack(batch, dist.group.WORLD, 4, ForwardOptions(temperature=1.0, entropy="none"))


def make_attention(scale=None, **changes):
    kind = {"attn_mask_type": AttnMaskType.causal, "attention_type": "self", "attention_dropout": 0.0} | changes
    family = SimpleNamespace(score_cap=None, windows=(), has_sinks=False)
    return PackedAttention(SimpleNamespace(), 3, softmax_scale=scale, cp_comm_type="p2p", family=family, **kind)


@pytest.mark.parametrize(("scale", "width"), [(None, WIDTH), (0.2, WIDTH), (0.2, 5)])
def test_each_sequence_attends_to_itself_and_not_to_what_follows(scale, width, packed):
    """Also with values of another width, which then come without the batch's dimension."""
    size = packed.tokens.shape[1]
    widths = ((NUM_HEADS, WIDTH), (NUM_KV_HEADS, WIDTH), (NUM_KV_HEADS, width))
    query, key, value = (torch.randn(size, 1, *heads) for heads in widths)
    states = (query, key, value) if width == WIDTH else (heads.squeeze(1) for heads in (query, key, value))
    found = make_attention(scale)(*states, None, packed_seq_params=packed)
    assert found.shape == (size, 1, NUM_HEADS * width)
    for start, end in itertools.pairwise(packed.batch.offsets.tolist()):
        for head in range(NUM_HEADS):
            shared = head // (NUM_HEADS // NUM_KV_HEADS)
            queries, keys, values = (
                states[start:end, 0, number].double() for states, number in ((query, head), (key, shared), (value, shared))
            )
            scores = queries @ keys.T * (scale or 1 / math.sqrt(WIDTH))
            scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)
            own = found[start:end, 0, head * width : (head + 1) * width]
            torch.testing.assert_close(own.double(), scores.softmax(1) @ values, atol=1e-5, rtol=1e-5)
    assert not found[packed.batch.packed.num_tokens :].any()


@pytest.mark.parametrize(
    "change", [{"attn_mask_type": AttnMaskType.padding}, {"attention_type": "cross"}, {"attention_dropout": 0.1}], ids=str
)
def test_any_other_attention_is_refused(change):
    with pytest.raises(ContractError, match="layer 3: .* causal self-attention"):
        make_attention(**change)


def test_angles_are_those_of_the_place_in_the_sequence(packed):
    frequencies = torch.tensor([1.0, 0.1, 0.01])
    rotary = PackedRotary(frequencies)
    assert rotary.get_rotary_seq_len(None, None, None, None, packed) is packed
    found = rotary(packed)
    assert found.shape == (packed.tokens.shape[1], 1, 1, 6)
    expected = packed.positions.double()[:, None] * frequencies.double()
    torch.testing.assert_close(found[:, 0, 0].double(), torch.cat((expected, expected), 1))
    assert not rotary.state_dict(), "no checkpoint holds them"


@pytest.mark.parametrize("name", ["gpt_oss", "gemma2", "gemma3_text"])
def test_windows_sinks_caps_and_the_scale_of_scores_are_those_of_the_model(name, tmp_path):
    """With a window in the first of two layers, against transformers; rotation in Gemma 3's has a base of its own."""
    directory, batch = make_own(tmp_path / "model", name, num_hidden_layers=2), make_batch(seed=1)
    with torch.no_grad():
        expected, _ = Reference(directory, OPTIMIZER).logprobs(batch)
    backend = make_backend(directory)
    request = LogprobsRequest(microbatches=(batch,), model="policy", temperature=TEMPERATURE, entropy=False, weight_version=0)
    np.testing.assert_allclose(np.concatenate(backend.get_logprobs(request).logprobs), expected.numpy(), atol=1e-5)
    backend.close(CloseRequest())
