"""Checks of a trainer whose sequences read images besides text."""

import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from attrs import evolve

from rlcore.spi import ModelError, ModelSpec, Provider, TokenBatch, capabilities
from rlcore.spi.arrays import Int32Array, offsets_of
from rlcore_conformance.references.fixtures import require
from rlcore_conformance.references.huggingface_images import HuggingFaceImages
from rlcore_conformance.references.reference import Float64Array, reference_logprobs
from rlcore_conformance.references.tensors import Values
from rlcore_conformance.trainers.batches import ARRANGEMENTS, Arrangement, arrange, arranged, make_batch
from rlcore_conformance.trainers.trainer_fixtures import OpenTrainer, TrainerFixtures, TrainerUnderTest
from rlcore_model_files.images import decode_image, load_image_processor

SIZES = ((16, 24), (9, 40))
"""Width and height of images in pixels."""
READS = ((0,), (), (1, 0), (), (1,), ())
"""The images of each sequence."""
TEMPERATURE = 0.7


class TrainerImages(TrainerFixtures):
    """Log-probabilities, gradients and weights are those of the whole model, its vision tower among it."""

    @pytest.fixture
    def images_trainer(
        self, provider: Provider, open_trainer: OpenTrainer, image_model: ModelSpec
    ) -> Iterator[TrainerUnderTest]:
        """A fresh trainer of a model that reads images."""
        require(provider, capabilities.IMAGES)
        with open_trainer(model=image_model, needs_reference=False) as trainer:
            yield trainer

    @pytest.fixture
    def images(self, image_model: ModelSpec) -> TokenBatch:
        """A batch of which some sequences read one image, some two and some none."""
        return image_batch(image_model, seed=1)

    @pytest.mark.parametrize("arrangement", ARRANGEMENTS)
    def test_logprobs_after_images_equal_the_reference(
        self,
        images_trainer: TrainerUnderTest,
        image_reference: Callable[[Values], HuggingFaceImages],
        images: TokenBatch,
        arrangement: Arrangement,
    ) -> None:
        """Whichever sequences share a microbatch, and where a microbatch has no image at all."""
        expected = image_logprobs(image_reference(images_trainer.weights()), images)
        found = images_trainer.logprobs(arrange(images, arrangement), temperature=TEMPERATURE)
        for part, wanted in zip(found, arranged(expected, images, arrangement), strict=True):
            images_trainer.assert_near(part, wanted)

    def test_another_image_changes_its_own_sequence_alone(self, images_trainer: TrainerUnderTest, images: TokenBatch) -> None:
        """Sequences of one microbatch do not see each other's images."""
        assert images.images is not None
        (before,) = images_trainer.logprobs((images,))
        second = images.images[2]
        others = (*images.images[:2], (draw(1, seed=9), *second[1:]), *images.images[3:])
        (after,) = images_trainer.logprobs((evolve(images, images=others),))
        changed = np.flatnonzero(np.abs(after - before) > images_trainer.tolerance)
        owners = {int(np.searchsorted(images.offsets, place, side="right")) - 1 for place in changed}
        assert owners == {2}, f"an image of sequence 2 changed the log-probabilities of sequences {sorted(owners)}"

    @pytest.mark.parametrize("arrangement", ARRANGEMENTS)
    def test_step_with_images_equals_the_reference(
        self,
        images_trainer: TrainerUnderTest,
        image_reference: Callable[[Values], HuggingFaceImages],
        images: TokenBatch,
        arrangement: Arrangement,
    ) -> None:
        """The norm of the gradient by all parameters, those of the vision tower too, and the weights behind the step."""
        policy, loss = image_reference(images_trainer.weights()), images_trainer.loss
        norm = policy.gradient_norm(images, loss, TEMPERATURE)
        outcome = images_trainer.outcome(arrange(images, arrangement), temperature=TEMPERATURE)
        images_trainer.assert_grad_norm(outcome.result, norm)
        after = image_logprobs(image_reference(outcome.weights), images)
        (found,) = images_trainer.logprobs((images,), 1, temperature=TEMPERATURE)
        images_trainer.assert_near(found, after, "the exported weights are not those that the trainer computes with")

    def test_every_part_of_the_model_trains(self, images_trainer: TrainerUnderTest, images: TokenBatch) -> None:
        """A step moves each tensor, of the vision tower too."""
        before = images_trainer.weights()
        after = images_trainer.outcome((images,)).weights
        still = [name for name, value in before.items() if np.array_equal(after[name], value)]
        assert not still, f"a step left {still[:3]} as they were"


def sequences_of(batch: TokenBatch) -> list[tuple[TokenBatch, tuple[bytes, ...]]]:
    """Each sequence alone, and the images that it reads."""
    assert batch.images is not None
    return [(batch.select(np.asarray([index])), files) for index, files in enumerate(batch.images)]


def image_logprobs(policy: HuggingFaceImages, batch: TokenBatch) -> Float64Array:
    """float64 [T]: the reference's log-probabilities of a packed batch."""
    found = [reference_logprobs(policy.reading(files), one, TEMPERATURE)[0] for one, files in sequences_of(batch)]
    return np.concatenate(found)


def draw(number: int, seed: int = 0) -> bytes:
    """A PNG file of noise."""
    from PIL import Image

    width, height = SIZES[number]
    pixels = np.random.default_rng([number, seed]).integers(0, 256, (height, width, 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="PNG")
    return buffer.getvalue()


def image_batch(model: ModelSpec, seed: int) -> TokenBatch:
    """The kit's batch, with placeholders of images before the text of some sequences, as many as the model's image processor
    says."""
    try:
        processor = load_image_processor(model.path, model.revision, trust_remote_code=model.trust_remote_code)
    except ModelError as error:
        pytest.skip(f"nothing here reads images: {error}")
    config = json.loads((Path(model.path) / "config.json").read_text(encoding="utf-8"))
    text = make_batch(int(config["text_config"]["vocab_size"]) - len(READS), seed)
    files = [draw(number) for number in range(len(SIZES))]
    shown = [_placeholders(processor, config, file) for file in files]
    heads = [np.concatenate([np.zeros(0, np.int32), *(shown[number] for number in numbers)]) for numbers in READS]
    parts = list(zip(heads, np.split(np.arange(text.num_tokens), text.offsets[1:-1]), strict=True))
    columns = {
        name: np.concatenate([part for head, own in parts for part in (np.zeros(len(head), column.dtype), column[own])])
        for name, column in text.token_columns.items()
    }
    return evolve(
        text,
        tokens=np.concatenate([part for head, own in parts for part in (head, text.tokens[own])]).astype(np.int32),
        offsets=offsets_of([len(head) + len(own) for head, own in parts]),
        loss_mask=np.concatenate(
            [part for head, own in parts for part in (np.zeros(len(head), np.bool_), text.loss_mask[own])]
        ),
        token_columns=columns,
        images=tuple(tuple(files[number] for number in numbers) for numbers in READS),
    )


def _placeholders(processor: object, config: dict[str, int], file: bytes) -> Int32Array:
    image = decode_image(file)
    patches = processor.get_number_of_image_patches(image.height, image.width, {})  # type: ignore[attr-defined]
    count = int(patches) // int(processor.merge_size) ** 2  # type: ignore[attr-defined]
    marks = (config["vision_start_token_id"], *[config["image_token_id"]] * count, config["vision_end_token_id"])
    return np.array(marks, np.int32)
