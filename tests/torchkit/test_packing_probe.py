"""Models that hand something from one sequence to the next, or compute in a way of their own, are found when they are built."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rlcore.spi import ModelError
from rlcore_torchkit.forward import decoder_forward, packing_probe
from rlcore_torchkit.forward.decoder_forward import patch_decoder
from rlcore_torchkit.forward.packing_probe import probe_packing
from rlcore_torchkit.layers.packed_attention import PACKED_ATTENTION, register_packed_attention

CPU = torch.device("cpu")
COMMON = {"hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 20, "initializer_range": 0.3, "pad_token_id": None}
ATTENTION = {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 24, "head_dim": 8}
SPECIAL = {"bos_token_id": None, "eos_token_id": None}


def make(name, **options):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = AutoConfig.for_model(name, **{**COMMON, **SPECIAL, **options})
        return AutoModelForCausalLM.from_config(config, attn_implementation=register_packed_attention()).eval()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("olmo2", ATTENTION),
        ("mamba", {"state_size": 4}),
        ("recurrent_gemma", {**ATTENTION, "lru_width": 16, "num_hidden_layers": 3, "logits_soft_cap": 0.1}),
        ("xlstm", {"num_heads": 2, "chunk_size": 8, "output_logit_soft_cap": 0.1}),
        ("hyperclovax", {**ATTENTION, "logits_scaling": 0.125}),
    ],
)
def test_what_keeps_sequences_apart_passes_and_is_left_as_it_was(name, options):
    model = make(name, **options)
    patch_decoder(model)
    forward = model.forward
    probe_packing(model, CPU, torch.float32)
    assert model.forward is forward
    assert model.config._attn_implementation == PACKED_ATTENTION


@pytest.mark.parametrize(
    ("forgotten", "name", "options", "own_logits"),
    [
        ((decoder_forward, "has_states", lambda model: False), "mamba", {"state_size": 4, "num_hidden_layers": 4}, False),
        ((packing_probe, "layer_windows", lambda config: 2), "olmo2", ATTENTION, False),
        ((decoder_forward, "head_scale", lambda config: 1.0), "cohere", {**ATTENTION, "logit_scale": 0.5}, True),
    ],
    ids=["states", "windows", "logits"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_not_known_of_a_class_is_computed_by_itself(forgotten, name, options, own_logits, dtype, monkeypatch, caplog):
    """States that reach the next sequence, windows that layers keep to themselves, logits of another form."""
    monkeypatch.setattr(*forgotten)
    model = make(name, **options).to(dtype)
    patch_decoder(model)
    probe_packing(model, CPU, dtype)
    assert model.config._attn_implementation == (PACKED_ATTENTION if own_logits else "eager")
    assert f"computes {'logits' if own_logits else 'attention'} by itself" in caplog.text


def test_states_are_kept_where_logits_are_of_another_form(monkeypatch, caplog):
    monkeypatch.setattr(decoder_forward, "logit_cap", lambda config: None)
    model = make("xlstm", num_heads=2, chunk_size=8, output_logit_soft_cap=0.1)
    patch_decoder(model)
    probe_packing(model, CPU, torch.float32)
    assert model.config._attn_implementation == PACKED_ATTENTION
    assert "computes logits by itself" in caplog.text


def test_tokens_that_a_shorter_head_lacks_are_not_tried():
    model = make("olmo2", **ATTENTION)
    model.resize_token_embeddings(80)
    model.lm_head = torch.nn.Linear(16, 20, bias=False)
    patch_decoder(model)
    probe_packing(model, CPU, torch.float32)
    assert model.config._attn_implementation == PACKED_ATTENTION


def test_tokens_that_see_later_ones_are_refused():
    model = make("bert", num_attention_heads=2, intermediate_size=24)
    patch_decoder(model)
    with pytest.raises(ModelError, match="later tokens"):
        probe_packing(model, CPU, torch.float32)
