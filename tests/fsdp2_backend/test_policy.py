"""The trained model, its narrow copy and its frozen reference on one rank; on several they are compared in test_load."""

import numpy as np
import pytest
import torch
from attrs import evolve
from fsdp2_support import TEMPERATURE, WEIGHTED, assert_same, make_batch, make_config, make_context
from transformers import AutoModelForCausalLM

from rlcore.spi import LoraSpec, ModelSpec
from rlcore_fsdp2.gradients import accumulate
from rlcore_fsdp2.policy import make_adapted_policy, make_policy, make_reference, make_working_copy
from rlcore_torchkit.head.logprobs import packed_logprobs
from rlcore_torchkit.layers.attention import PackedSequences
from rlcore_torchkit.trainer.losses import DeferredErrors
from rlcore_torchkit.trainer.microbatch import move

CPU = torch.device("cpu")


def own_weights(directory, dtype):
    """Those of transformers' model of the directory."""
    return dict(AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).named_parameters())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_masters_are_float32_and_copies_and_reference_of_the_recipes_dtype(dtype, model_directory):
    spec, config = ModelSpec(path=str(model_directory()), dtype=dtype), make_config()
    policy, _ = make_policy(spec, config, None, CPU)
    reference = make_reference(spec, config, None, CPU)
    working = make_working_copy(spec, config, policy, CPU).model
    wide, narrow = own_weights(spec.path, torch.float32), own_weights(spec.path, getattr(torch, dtype))
    for model, expected, is_trained in ((policy, wide, True), (reference, narrow, False), (working, narrow, True)):
        assert_same(dict(model.named_parameters()), expected, tolerance=0.0)
        assert {parameter.requires_grad for parameter in model.parameters()} == {is_trained}
        assert {parameter.dtype for parameter in model.parameters()} == {parameter.dtype for parameter in expected.values()}
        assert not model.training, "without dropout"


def test_activation_checkpointing_changes_no_gradient_and_recomputes(model_directory):
    batch = move(make_batch(), CPU, WEIGHTED.token_columns)
    gradients, calls = [], []
    for enabled in (False, True):
        spec = ModelSpec(path=str(model_directory()))
        model, _ = make_policy(spec, make_config(activation_checkpointing=enabled), None, CPU)
        seen = []
        model.model.layers[0].mlp.register_forward_pre_hook(lambda *_, seen=seen: seen.append(1))
        accumulate(
            model, [batch], WEIGHTED, make_batch().counts(), TEMPERATURE, DeferredErrors(), reduce_every_microbatch=False
        )
        gradients.append({name: p.grad for name, p in model.named_parameters()})
        calls.append(len(seen))
    assert calls == [1, 2]
    assert_same(*gradients, tolerance=0.0)


@pytest.mark.parametrize(
    ("architecture", "dtype", "lora", "shares"),
    [
        ("qwen3", "float32", None, True),
        ("qwen3", "bfloat16", None, False),
        ("qwen3", "float32", LoraSpec(rank=2), True),
        ("qwen3", "float32", LoraSpec(rank=2, dropout=0.1), False),
        ("qwen3_moe", "float32", None, False),
    ],
)
def test_common_prompts_are_computed_once_where_nothing_tells_them_apart(architecture, dtype, lora, shares, model_directory):
    context = evolve(make_context(model_directory(architecture), dtype=dtype), lora=lora)
    if lora is None:
        model = make_reference(context.model, make_config(), None, CPU)
    else:
        model, _, _ = make_adapted_policy(context, make_config(), None, CPU)
    computed = []
    model.model.embed_tokens.register_forward_hook(lambda *arguments: computed.append(arguments[2].shape[1]))
    tokens, packed = torch.arange(10).repeat(3), PackedSequences.from_offsets(np.array([0, 10, 20, 30]), CPU)
    packed_logprobs(model, tokens, packed, temperature=1.0)
    assert computed == [10 if shares else 30]
