"""Heads with biases, caps and scales, and padded rows, against transformers' own logits of one sequence at a time."""

import itertools

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rlcore.spi import SamplingMask
from rlcore_torchkit.forward import decoder_forward
from rlcore_torchkit.forward.decoder_forward import general_forward, own_forward, padded_forward, patch_decoder
from rlcore_torchkit.head.logprobs import packed_logprobs
from rlcore_torchkit.head.sampling_mask import KeptTokens
from rlcore_torchkit.layers.attention import PackedSequences
from rlcore_torchkit.layers.packed_attention import register_packed_attention

LENGTHS = (3, 11, 6)
TEMPERATURE = 1.7
SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
COMMON = {**SIZES, "num_hidden_layers": 2, "vocab_size": 20, "initializer_range": 0.3, "max_position_embeddings": 64}


def make(name, **options):
    ids = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    config = AutoConfig.for_model(name, **COMMON, **ids, **options)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float64, attn_implementation="eager").eval()
    with torch.no_grad():
        for tensor in model.parameters():
            if tensor.ndim == 1:
                tensor.add_(torch.linspace(-0.5, 0.5, len(tensor)))
    return model


def packed_tokens():
    tokens = torch.from_numpy(np.random.default_rng(0).integers(0, 20, sum(LENGTHS)))
    return tokens, PackedSequences.from_offsets(np.cumsum([0, *LENGTHS]), "cpu")


def alone(model, tokens):
    """Log-probabilities and entropies [T] by the class's own logits."""
    columns = []
    for sequence in torch.split(tokens, LENGTHS):
        distribution = torch.distributions.Categorical(logits=model(input_ids=sequence[None]).logits[0, :-1] / TEMPERATURE)
        found = distribution.log_prob(sequence[1:]), distribution.entropy()
        columns.append([torch.cat([torch.zeros(1, dtype=torch.float64), values]) for values in found])
    return [torch.cat(values) for values in zip(*columns, strict=True)]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gemma2", {"final_logit_softcapping": 0.8, "query_pre_attn_scalar": 8}),
        ("phi", {}),
        ("cohere", {"logit_scale": 0.3}),
        ("granite", {"logits_scaling": 5.0}),
    ],
)
def test_values_and_gradients_equal_the_classes_own(name, options, monkeypatch):
    monkeypatch.setattr(decoder_forward, "chunk_rows", lambda *_: 4)
    model, (tokens, packed) = make(name, **options), packed_tokens()
    weights = torch.linspace(-1, 1, len(tokens), dtype=torch.float64)
    results = []
    for patched in (False, True):
        if patched:
            model.set_attn_implementation(register_packed_attention())
            patch_decoder(model)
            values = packed_logprobs(model, tokens, packed, temperature=TEMPERATURE, entropy="loss")
        else:
            values = alone(model, tokens)
        (values[0] @ weights + 0.3 * values[1] @ weights).backward()
        results.append([*values, *(parameter.grad for parameter in model.parameters())])
        model.zero_grad()
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5, check_dtype=False)


def test_the_entropy_is_left_out_or_without_a_gradient_where_no_loss_asks():
    model, (tokens, packed) = make("phi"), packed_tokens()
    model.set_attn_implementation(register_packed_attention())
    patch_decoder(model)
    assert packed_logprobs(model, tokens, packed, temperature=1.0)[1] is None
    assert not packed_logprobs(model, tokens, packed, temperature=1.0, entropy="metric")[1].requires_grad


def test_rows_and_padded_rows_say_the_same_without_states():
    model, (tokens, packed) = make("olmo2"), packed_tokens()
    model.set_attn_implementation(register_packed_attention())
    found = [forward(model, tokens, packed) for forward in (general_forward, padded_forward)]
    torch.testing.assert_close(*found, rtol=0, atol=1e-12)


def test_padding_is_a_small_share_of_the_rows(monkeypatch):
    """One long sequence among short ones: rows for each sequence, a group of similar lengths at a time."""
    model, lengths = make("olmo2"), [40, *[2] * 20]
    tokens = torch.arange(sum(lengths)) % 20
    packed, whole, computed = PackedSequences.from_offsets(np.cumsum([0, *lengths]), "cpu"), model.model.forward, []

    def forward(input_ids, **given):
        computed.append(input_ids.numel())
        return whole(input_ids=input_ids, **given)

    monkeypatch.setattr(model.model, "forward", forward)
    found = own_forward(model, tokens, packed)
    assert sum(computed) <= 1.25 * len(tokens)
    expected = [whole(input_ids=row[None]).last_hidden_state[0] for row in torch.split(tokens, lengths)]
    torch.testing.assert_close(found, torch.cat(expected), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["gemma2", "phi", "cohere"])
def test_kept_tokens_alone_are_normalised_over(name, monkeypatch):
    """Capped, with a bias, scaled."""
    monkeypatch.setattr(decoder_forward, "chunk_rows", lambda *_: 4)
    options = {"gemma2": {"final_logit_softcapping": 0.8}, "phi": {}, "cohere": {"logit_scale": 0.3}}[name]
    model, (tokens, packed) = make(name, **options), packed_tokens()
    rows = [[] if place % 4 == 3 else sorted({token, place % 7, 19}) for place, token in enumerate(tokens.tolist())]
    expected, offsets = torch.zeros(len(tokens), dtype=torch.float64), packed.offsets
    for start, end in itertools.pairwise(offsets.tolist()):
        logits = model(input_ids=tokens[None, start:end]).logits[0] / TEMPERATURE
        for place in range(start + 1, end):
            kept = rows[place] or list(range(20))
            chosen = kept.index(int(tokens[place]))
            expected[place] = logits[place - 1 - start, kept].log_softmax(0)[chosen].detach()
    model.set_attn_implementation(register_packed_attention())
    patch_decoder(model)
    kept = KeptTokens.of(SamplingMask.of([np.array(row, np.int32) for row in rows]), torch.device("cpu"))
    found, _ = packed_logprobs(model, tokens, packed, temperature=TEMPERATURE, kept=kept)
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=0)
    found.sum().backward()
    assert model.get_output_embeddings().weight.grad.isfinite().all()
