"""Models of text and images: three steps, and what they leave, against transformers on one sequence at a time."""

import numpy as np
import pytest
import torch
from attrs import evolve
from fsdp2_support import TEMPERATURE, assert_stepped_alike, exported, make_config, split, step_request
from image_support import ImageReference, image_batch, png

from rlcore.spi import ContractError, LogprobsRequest, SaveStateRequest
from rlcore_torchkit.testing.image_models import make_image_model

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")


@pytest.fixture(scope="module")
def image_model(tmp_path_factory):
    return {name: make_image_model(tmp_path_factory.mktemp("images") / name, name) for name in FAMILIES}


def logprobs_of(trainer, batches):
    request = LogprobsRequest(
        microbatches=tuple(batches), model="policy", temperature=TEMPERATURE, entropy=False, weight_version=0
    )
    return np.concatenate(trainer.get_logprobs(request).logprobs)


STEPPED = [("qwen2_vl", "none"), ("qwen2_5_vl", "none"), ("qwen3_vl", "none"), ("qwen3_vl", "vision")]


@pytest.mark.parametrize(("family", "freeze"), STEPPED)
def test_three_steps_and_what_they_leave(family, freeze, image_model, tmp_path, backend):
    directory = image_model[family]
    trainer = backend(directory, config=make_config(freeze=freeze))
    reference = ImageReference(directory, frozen="visual" if freeze == "vision" else None)
    before = exported(trainer)
    for version in range(3):
        batch = image_batch(directory, version)
        result = trainer.train_step(step_request(split(batch, [[0, 5], [1, 3], [2, 4]]), batch.counts(), version))
        loss, norm = reference.step(batch)
        assert result.loss == pytest.approx(loss, abs=1e-4)
        assert result.grad_norm == pytest.approx(norm, rel=1e-3)
    saved, found = reference.saved(tmp_path / "reference"), exported(trainer, 3)
    assert found.keys() == saved.keys()
    compared = [
        name for name in saved if not name.endswith(("k_proj.bias", "qkv.bias"))
    ]  # a part of their gradient is rounding
    assert_stepped_alike({name: found[name] for name in compared}, {name: saved[name] for name in compared})
    moved = {name for name, tensor in found.items() if not torch.equal(tensor, before[name])}
    vision = {name for name in found if "visual" in name}
    assert vision
    assert bool(vision & moved) == (freeze == "none")
    (tmp_path / "saved").mkdir()
    trainer.save_state(SaveStateRequest(directory=tmp_path / "saved", kind="hf"))
    reloaded = ImageReference(tmp_path / "saved")  # with its image processor
    with torch.no_grad():
        torch.testing.assert_close(reloaded.logprobs(batch)[0], reference.logprobs(batch)[0], rtol=0.0, atol=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_is_as_alone(family, image_model, backend):
    batch = image_batch(image_model[family], 0)
    trainer = backend(image_model[family])
    together = logprobs_of(trainer, [batch])
    alone = logprobs_of(trainer, split(batch, [[n] for n in range(batch.num_sequences)]))
    np.testing.assert_allclose(together, alone, rtol=0.0, atol=1e-5)
    others = evolve(batch, images=(*batch.images[:2], (batch.images[2][0], png(0, seed=1)), *batch.images[3:]))
    changes = np.abs(logprobs_of(trainer, [others]) - together)
    assert [bool(changes[own].max() > 1e-3) for own in map(slice, batch.offsets[:-1], batch.offsets[1:])] == [
        number == 2 for number in range(6)
    ]


def test_a_placeholder_that_the_policy_said_is_a_token_as_any_other(image_model, backend):
    directory = image_model["qwen3_vl"]
    batch, trainer, reference = image_batch(directory, 0), backend(directory), ImageReference(directory)
    base = logprobs_of(trainer, [batch])
    said = batch.tokens.copy()
    said[batch.offsets[1] - 1] = reference.model.config.image_token_id
    changed = logprobs_of(trainer, [evolve(batch, tokens=said)])
    different = np.flatnonzero(np.abs(changed - base) > 1e-6)
    assert different.tolist() == [batch.offsets[1] - 1]


@pytest.mark.parametrize(
    "reads", [((0,), (), (1, 0), (), (1,), (0,)), ((0,), (), (0, 1), (), (1,), ()), ((1,), (), (1, 0), (), (1,), ())]
)
def test_images_of_other_sizes_than_a_sequence_has_placeholders_for_are_refused(reads, image_model, backend):
    """A text with an image, images in another order, and a smaller image."""
    batch, files = image_batch(image_model["qwen3_vl"], 0), [png(0), png(1)]
    images = tuple(tuple(files[number] for number in own) for own in reads)
    with pytest.raises(ContractError, match="placeholders"):
        logprobs_of(backend(image_model["qwen3_vl"]), [evolve(batch, images=images)])


def test_a_processor_that_makes_less_of_an_image_is_refused(image_model, tmp_path, backend):
    """That of a teacher, say, which would take the rest of the placeholders for text."""
    directory = image_model["qwen3_vl"]
    smaller = make_image_model(tmp_path / "smaller", "qwen3_vl", max_pixels=16 * 16)
    with pytest.raises(ContractError, match="preprocessor_config.json"):
        logprobs_of(backend(smaller), [image_batch(directory, 0)])


def test_a_model_of_text_refuses_images(image_model, backend):
    batch = image_batch(image_model["qwen3_vl"], 0)
    with pytest.raises(ContractError, match="text alone"):
        logprobs_of(backend(), [batch])
