"""Families against transformers: some in each run of the tests, all of them in the long ones."""

import pytest
import torch
from attrs import evolve

from rlcore.spi import ModelSpec
from rlcore_fsdp2.families.command import class_names
from rlcore_fsdp2.families.images import ImageReference
from rlcore_fsdp2.families.trial import try_family, try_image_family, try_model
from rlcore_torchkit.architectures.decoders import IMAGE_MODELS, has_states, is_vision
from rlcore_torchkit.forward.image_forward import decode_images, image_processor, shown_images
from rlcore_torchkit.huggingface.models import load_model
from rlcore_torchkit.layers.attention import PackedSequences
from rlcore_torchkit.testing.families.reference import Reference
from rlcore_torchkit.testing.families.tiny_model import make_tiny

NAMES = class_names()
SOME = ["bloom", "deepseek_v32", "falcon_mamba", "gemma4_text", "hrm_text", "minimax", "qwen3_5_text", "bert", "camembert"]
"""ALiBi, sparse attention, states alone, shared and per-layer keys, tensors that files join, a cache of its own, gated delta
nets, a head with layers, a tied head with another name."""


@pytest.mark.wide(keep=SOME)
@pytest.mark.parametrize("name", sorted(NAMES))
def test_a_family_agrees_with_transformers_or_is_refused_with_a_reason(name, tmp_path):
    outcome = try_family(name, NAMES[name], tmp_path)
    assert outcome.is_sound, outcome.line
    assert (outcome.trainer != "agrees") == bool(outcome.trainer_reason)
    if name in SOME:
        assert (outcome.trainer, outcome.generator) == ("agrees", "agrees")


@pytest.mark.wide(keep=["qwen3_5", "glm4v", "qwen3_vl_moe"])
@pytest.mark.parametrize("name", sorted(IMAGE_MODELS))
def test_a_model_of_images_agrees_with_transformers(name, tmp_path):
    outcome = try_image_family(name, IMAGE_MODELS[name], tmp_path)
    assert outcome.trainer == "agrees", outcome.line
    check_chosen_features(ModelSpec(path=str(tmp_path / "model")))


@torch.no_grad()
def check_chosen_features(spec):
    """A context rank chooses rows of the vision tower's output: all of them are what the class takes by itself."""
    model, batch = load_model(spec, dtype=torch.float32, any_decoder=True), ImageReference(spec).batch(80)
    assert any(is_vision(name) for name, _ in model.named_parameters())
    tokens, packed = torch.from_numpy(batch.tokens), PackedSequences.from_offsets(batch.offsets, "cpu")
    shown = shown_images(image_processor(spec), model, tokens, packed, batch.images)
    every = evolve(shown, features=slice(0, int(shown.places.sum())))
    if not has_states(model):
        assert torch.equal(decode_images(model, tokens, packed, shown), decode_images(model, tokens, packed, every))


def test_other_images_are_wrong(tmp_path, monkeypatch):
    monkeypatch.setattr(ImageReference, "logits", lambda self, tokens, files: Reference.logits(self, tokens, ()))
    assert try_image_family("qwen3_vl", IMAGE_MODELS["qwen3_vl"], tmp_path).trainer == "wrong"


def test_other_classes_of_images_are_refused_with_the_reason(tmp_path):
    for name, reason in (("gemma3", "see later ones"), ("mllama", "cross-attention"), ("llava", "image_grid_thw")):
        outcome = try_image_family(name, "", tmp_path)
        assert outcome.trainer == "refused"
        assert reason in outcome.trainer_reason


def test_other_numbers_are_wrong(tmp_path, monkeypatch):
    assert try_family("llama", NAMES["llama"], tmp_path).way == "its description"
    assert try_model(tmp_path / "model", tmp_path).agrees
    whole = Reference.logprobs
    monkeypatch.setattr(Reference, "logprobs", lambda self, batch: 1.01 * whole(self, batch))
    outcome = try_model(tmp_path / "model", tmp_path)
    assert outcome.trainer == "wrong"
    assert "log-probabilities of packed sequences" in outcome.line


def test_what_is_raised_is_a_crash_with_its_place(tmp_path, monkeypatch):
    def fails(*_: object) -> None:
        raise ZeroDivisionError("no batch")

    monkeypatch.setattr(Reference, "batch", fails)
    outcome = try_family("llama", NAMES["llama"], tmp_path)
    assert outcome.trainer == "crashed"
    assert outcome.trainer_reason.startswith("ZeroDivisionError: no batch (test_trial.py:")


def test_a_family_of_which_there_is_no_default_is_not_tried(tmp_path):
    outcome = try_family("musicgen", NAMES["musicgen"], tmp_path)
    assert (outcome.trainer, outcome.generator, outcome.is_sound) == ("not tried", "not tried", True)
    assert "no default" in outcome.trainer_reason


@pytest.mark.parametrize(("name", "expected"), [("bert", "is_decoder = true"), ("bart", ""), ("gpt_neox", ""), ("llama", "")])
def test_options_that_make_a_class_a_decoder_are_named(name, expected, tmp_path):
    assert make_tiny(name, NAMES[name], tmp_path) == expected
