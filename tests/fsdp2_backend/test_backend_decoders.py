"""Three steps of every family that trains by its own class, against transformers and torch on one sequence at a time."""

import json

import pytest
import torch
from attrs import evolve
from decoder_families import DESCRIBED, OWN_ATTENTION, REFUSED, TRAINED, make_family
from fsdp2_support import (
    Reference,
    assert_stepped_alike,
    exported,
    make_batch,
    make_config,
    make_context,
    split,
    step_request,
)
from gradient_norm_cases import assert_norms, norms_in_files
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rlcore.spi import CloseRequest, LogprobsRequest, LoraSpec, ModelError, SaveStateRequest
from rlcore_fsdp2.backend import Fsdp2Backend
from rlcore_torchkit.adapters.lora import Dropout

FAMILIES = {**DESCRIBED, **TRAINED, **OWN_ATTENTION}
KEY_BIASES = {"phi": "k_proj.bias", "gpt2": "c_attn.bias", "bloom": "query_key_value.bias"}
"""Biases that are in all of a query's scores alike: AdamW makes a part of a step of their gradient, which is rounding alone."""


@pytest.mark.parametrize("family", FAMILIES)
def test_three_steps_and_what_they_leave(family, tmp_path, backend):
    directory = make_family(tmp_path / "model", family, FAMILIES[family])
    trainer, reference = backend(directory), Reference(directory)
    for version in range(3):
        batch = make_batch(seed=version)
        request = step_request(split(batch, [[0, 5], [1, 2, 3, 4]]), batch.counts(), version)
        result = trainer.train_step(evolve(request, gradient_norms=version == 0))
        if version == 0:
            reference.backward(batch)
            assert_norms(result, norms_in_files(reference.model, reference.gradients()), 1e-3)
            reference.optimizer.zero_grad()
        loss, norm = reference.step(batch)
        assert result.loss == pytest.approx(loss, abs=1e-4)
        assert result.grad_norm == pytest.approx(norm, rel=1e-3)
    saved = reference.saved(tmp_path / "reference")
    found = exported(trainer, 3)
    assert found.keys() == saved.keys()
    compared = [name for name in saved if not name.endswith(KEY_BIASES.get(family, "no such name"))]
    assert_stepped_alike({name: found[name] for name in compared}, {name: saved[name] for name in compared})
    (tmp_path / "saved").mkdir()
    trainer.save_state(SaveStateRequest(directory=tmp_path / "saved", kind="hf"))
    assert load_file(tmp_path / "saved" / "model.safetensors").keys() == saved.keys()
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32, attn_implementation="eager")
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        found, expected = (model(input_ids=tokens, use_cache=False).logits for model in (reloaded, reference.model))
    torch.testing.assert_close(found, expected, rtol=0.0, atol=1e-3)


@pytest.mark.parametrize("family", REFUSED)
def test_what_is_not_causal_is_refused_when_it_is_built(family, tmp_path, backend):
    options, reason = REFUSED[family]
    directory = make_family(tmp_path / "model", family, options)
    with pytest.raises(ModelError, match=reason):
        backend(directory)


OWN_CODE = """
from transformers import Olmo2Config, Olmo2ForCausalLM


class OwnConfig(Olmo2Config):
    model_type = "own"


class Own(Olmo2ForCausalLM):
    config_class = OwnConfig
"""


def test_code_that_the_recipe_trusts_is_trained_and_saved(tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    directory, batch = make_family(tmp_path / "model", "olmo2", {}), make_batch()
    config = json.loads((directory / "config.json").read_text())
    own = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.Own"}
    (directory / "config.json").write_text(
        json.dumps(config | {"model_type": "own", "architectures": ["Own"], "auto_map": own})
    )
    (directory / "own.py").write_text(OWN_CODE)
    context = make_context(directory)
    with pytest.raises(ModelError, match="model_type own"):
        Fsdp2Backend(context, make_config())
    trainer = Fsdp2Backend(evolve(context, model=evolve(context.model, trust_remote_code=True)), make_config())
    trainer.train_step(step_request([batch], batch.counts()))
    (tmp_path / "saved").mkdir()
    files = trainer.save_state(SaveStateRequest(directory=tmp_path / "saved", kind="hf")).files
    assert "own.py" in files
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", trust_remote_code=True)
    assert type(reloaded).__name__ == "Own"
    weights = exported(trainer, 1)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in reloaded.state_dict().items())
    trainer.close(CloseRequest())


@pytest.mark.parametrize("options", [{"activation_checkpointing": True}, {"cpu_offload": True}], ids=str)
def test_options_change_no_step(options, tmp_path, backend):
    directory, batch = make_family(tmp_path / "model", "gemma3_text", TRAINED["gemma3_text"]), make_batch()
    trainers = [backend(directory), backend(directory, config=make_config(**options))]
    for trainer in trainers:
        trainer.train_step(step_request(split(batch, [[0, 5], [1, 2, 3, 4]]), batch.counts()))
    assert_stepped_alike(*(exported(trainer, 1) for trainer in trainers))


def test_in_bfloat16_the_working_copy_and_the_reference_say_nearly_the_same(tmp_path, backend):
    directory, batch = make_family(tmp_path / "model", "gpt_oss", TRAINED["gpt_oss"]), make_batch()
    trainer = backend(directory, dtype="bfloat16", needs_reference=True)
    found = []
    for model in ("policy", "reference"):
        request = LogprobsRequest(microbatches=(batch,), temperature=1.0, weight_version=0, model=model, entropy=False)
        found.append(torch.from_numpy(trainer.get_logprobs(request).logprobs[0]))
    torch.testing.assert_close(*found, rtol=0.0, atol=1e-6)


def test_the_biases_of_routers_are_exported_as_they_are_kept(tmp_path, backend):
    directory = make_family(tmp_path / "model", "glm4_moe", TRAINED["glm4_moe"])
    found = exported(backend(directory, dtype="bfloat16"), dtype="bfloat16")
    kept = {name: tensor for name, tensor in found.items() if tensor.dtype != torch.bfloat16}
    assert {name.rpartition(".")[2] for name in kept} == {"e_score_correction_bias"}
    saved = load_file(directory / "model.safetensors")
    assert all(torch.equal(tensor, saved[name]) for name, tensor in kept.items())


def test_adapters_are_beside_every_linear_layer_of_the_decoder(tmp_path):
    directory, batch = make_family(tmp_path / "model", "phi3", TRAINED["phi3"]), make_batch()
    trainer = Fsdp2Backend(evolve(make_context(directory), lora=LoraSpec(rank=2, targets=("all-linear",))), make_config())
    before = exported(trainer)
    names = {name.rpartition(".")[2] for name in trainer.adapters.layers}
    assert names == {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}
    trainer.train_step(step_request([batch], batch.counts()))
    after = exported(trainer, 1)
    changed = {name for name in after if not torch.equal(before[name], after[name])}
    assert changed == {f"{name}.weight" for name in trainer.adapters.layers}
    trainer.close(CloseRequest())


def test_adapters_drop_inputs_of_every_sequence_where_each_has_a_row_of_its_own(tmp_path, monkeypatch):
    directory, batch = make_family(tmp_path / "model", "qwen3_next", TRAINED["qwen3_next"]), make_batch()
    lora = LoraSpec(rank=2, targets=("q_proj", "in_proj_qkvz", "up_proj"), dropout=0.5)
    trainer = Fsdp2Backend(evolve(make_context(directory), lora=lora), make_config())
    drawn, kept = {}, Dropout.kept

    def watched(dropout, name, states, *sizes, **places):
        drawn[name] = kept(dropout, name, states, *sizes, **places)
        return drawn[name]

    monkeypatch.setattr(Dropout, "kept", watched)
    trainer.train_step(step_request([batch], batch.counts()))
    assert drawn.keys() == trainer.adapters.layers.keys()
    for values in drawn.values():
        assert len(values) == batch.num_sequences * batch.lengths.max()
        assert set(values.unique().tolist()) == {0.0, 2.0}
        assert (values == 0).any(-1).all(), "each token has inputs that are dropped"
    trainer.close(CloseRequest())
