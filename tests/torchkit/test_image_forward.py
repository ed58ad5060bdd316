"""Pixels, places and positions of images in packed sequences."""

import io

import numpy as np
import pytest
import torch
from PIL import Image

from rlcore.spi import ContractError, ModelSpec
from rlcore_model_files.images import image_size, load_image_processor
from rlcore_torchkit.forward.context_parallel import ContextPart
from rlcore_torchkit.forward.image_forward import (
    freeze_vision,
    grids_of,
    patch_any_decoder,
    pixels_of,
    place_images,
    shown_images,
)
from rlcore_torchkit.head.logprobs import packed_logprobs
from rlcore_torchkit.huggingface.models import load_model
from rlcore_torchkit.layers.attention import PackedSequences
from rlcore_torchkit.testing.image_models import make_image_model


def png(width, height, seed=0):
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="PNG")
    return buffer.getvalue()


@pytest.fixture(scope="module")
def spec(tmp_path_factory):
    return ModelSpec(path=str(make_image_model(tmp_path_factory.mktemp("images") / "model", "qwen3_vl")))


@pytest.fixture
def model(spec):
    return load_model(spec, dtype=torch.float32, any_decoder=True)


@pytest.fixture(scope="module")
def processor(spec):
    return load_image_processor(spec.path, None, trust_remote_code=False)


def test_an_image_that_occurs_again_has_the_same_pixels(processor):
    files = [png(16, 8), png(8, 24, seed=1), png(16, 8)]
    pixels, grids = pixels_of(processor, files)
    assert grids.tolist() == [[1, 2, 4], [1, 6, 2], [1, 2, 4]]
    alone = [pixels_of(processor, [file])[0] for file in files]
    assert torch.equal(pixels, torch.cat(alone))


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_sizes_alone_say_the_grids_of_qwens_processors(tmp_path, monkeypatch, family):
    directory = make_image_model(tmp_path / "model", family)
    processor = load_image_processor(str(directory), None, trust_remote_code=False)
    random = np.random.default_rng(5)
    files = [png(int(width), int(height)) for width, height in random.integers(4, 200, (20, 2))]
    expected = pixels_of(processor, files)[1]
    monkeypatch.setattr("rlcore_torchkit.forward.image_forward.decode_image", None)
    found = grids_of(processor, files)
    assert found.dtype == expected.dtype
    assert torch.equal(found, expected)
    assert [processor.get_number_of_image_patches(*image_size(file), {}) for file in files] == found.prod(1).tolist()


def test_other_processors_make_the_pixels_for_the_grids():
    class Other:
        def __call__(self, images, return_tensors):
            return {"pixel_values": torch.zeros(len(images), 3), "image_grid_thw": torch.ones(len(images), 3).long()}

    assert grids_of(Other(), [png(8, 8), png(16, 8)]).tolist() == [[1, 1, 1], [1, 1, 1]]


def test_positions_without_pixels_are_those_with_them(model, processor):
    pad, files = model.config.image_token_id, (png(16, 8), png(8, 24, seed=1))
    counts = [int(grid.prod()) // model.config.vision_config.spatial_merge_size**2 for grid in pixels_of(processor, files)[1]]
    tokens = torch.tensor([5, *[pad] * counts[0], 6, *[pad] * counts[1], 7])
    packed = PackedSequences.from_offsets(np.array([0, len(tokens)]), torch.device("cpu"))
    whole = shown_images(processor, model, tokens, packed, (files,))
    alone = shown_images(processor, model, tokens, packed, (files,), has_pixels=False)
    assert alone.pixels.shape == (0, 0)
    assert all(torch.equal(getattr(alone, name), getattr(whole, name)) for name in ("grids", "places", "positions"))


def test_places_and_positions_of_each_sequence(model):
    """The rotary positions of arXiv:2409.12191, 2.1: text counts on, an image has one time, its rows and its columns, and what
    follows goes on behind the largest of them."""
    pad = model.config.image_token_id
    grids = torch.tensor([[1, 4, 6]])  # 2 x 3 tokens
    first, second = [5, pad, pad, pad, pad, pad, pad, 6, pad], [7, pad, 8]
    packed = PackedSequences.from_offsets(np.array([0, 9, 12]), torch.device("cpu"))
    places, positions = place_images(model, torch.tensor([*first, *second]), packed, [1, 0], grids)
    assert places.nonzero()[:, 0].tolist() == [1, 2, 3, 4, 5, 6]
    assert positions[:, 0].tolist() == [
        [0, 1, 1, 1, 1, 1, 1, 4, 5, 0, 1, 2],
        [0, 1, 1, 1, 2, 2, 2, 4, 5, 0, 1, 2],
        [0, 1, 2, 3, 1, 2, 3, 4, 5, 0, 1, 2],
    ]
    for others in (torch.tensor([[1, 4, 4]]), torch.tensor([[1, 4, 8]])):
        with pytest.raises(ContractError, match=r"rows of \[6\]"):
            place_images(model, torch.tensor([*first, *second]), packed, [1, 0], others)
    with pytest.raises(ContractError, match=r"expected \[6\]"):
        place_images(model, torch.tensor([*first, *second]), packed, [0, 1], grids)


@pytest.mark.parametrize("frozen", [False, True])
def test_the_vision_tower_gets_gradients_where_it_trains(frozen, model, spec):
    if frozen:
        freeze_vision(model)
    patch_any_decoder(model, spec)
    packed = PackedSequences.from_offsets(np.array([0, 4]), torch.device("cpu"))
    logprobs, _ = packed_logprobs(model, torch.tensor([5, 6, 7, 8]), packed, temperature=1.0)
    logprobs.sum().backward()  # no image: zeros, which ranks that have some can be added to
    found = {name: p.grad for name, p in model.named_parameters() if "visual" in name}
    assert len(found) > 10
    if frozen:
        assert set(found.values()) == {None}
    else:
        assert all(not gradient.any() for gradient in found.values())


@pytest.mark.parametrize("num_ranks", [2, 3, 5])
def test_context_ranks_hold_the_images_of_their_tokens(num_ranks, model, processor):
    """Images of several tokens over ranks that share them, have several, or none."""
    pad, files = model.config.image_token_id, [png(16, 24), png(48, 40), png(8, 8)]
    first = [5, *[pad] * 6, 6, *[pad] * 30, 7, 8]
    second, third = [9] * 12, [5, pad, 6]
    packed = PackedSequences.from_offsets(np.cumsum([0, len(first), len(second), len(third)]), torch.device("cpu"))
    tokens = torch.tensor([*first, *second, *third])
    images = ((files[0], files[1]), (), (files[2],))
    shown = shown_images(processor, model, tokens, packed, images)
    size = -(-len(tokens) // num_ranks)
    features = torch.arange(int(shown.places.sum()))
    by_image = features.split((shown.grids.prod(1) // 4).tolist())
    found, places, positions = [], [], []
    for rank in range(num_ranks):
        part = ContextPart(packed=packed, group=None, rank=rank, num_ranks=num_ranks, size=size)
        own = shown.part(part, 4)
        assert len(own.places) == own.positions.shape[2] == size
        assert len(own.pixels) == own.grids.prod(1).sum()
        held = [number for number, image in enumerate(shown.grids.tolist()) if image in own.grids.tolist()]
        assert torch.equal(own.pixels, torch.cat([shown.pixels[:0], *(pixels_of(processor, [files[n]])[0] for n in held)]))
        rows = torch.cat([features[:0], *(by_image[number] for number in held)])[own.features]
        assert len(rows) == own.places.sum()
        found.append(rows)
        places.append(own.places)
        positions.append(own.positions)
    assert torch.equal(torch.cat(found), features)
    assert torch.equal(torch.cat(places)[: len(tokens)], shown.places)
    assert torch.equal(torch.cat(positions, 2)[:, :, : len(tokens)], shown.positions)
