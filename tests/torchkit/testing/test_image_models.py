"""Small models of text and images are what transformers takes them for."""

import json

import pytest

from rlcore.model_files import image_token_id, reads_images
from rlcore_torchkit.testing.image_models import MARKS, make_image_model


@pytest.mark.parametrize("architecture", ["qwen2_vl", "qwen3_vl"])
def test_a_model_that_transformers_loads(architecture, tmp_path):
    pytest.importorskip("torch")
    pytest.importorskip("PIL")
    from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

    directory = make_image_model(tmp_path / "model", architecture, max_pixels=1024)
    config = json.loads((directory / "config.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert reads_images(config)
    assert tokenizer.convert_tokens_to_ids(MARKS[2]) == image_token_id(config)
    assert tokenizer("a<|image_pad|>").input_ids[1] == image_token_id(config)
    assert AutoImageProcessor.from_pretrained(directory).size["longest_edge"] == 1024
    model = AutoModelForImageTextToText.from_pretrained(directory)
    assert model.get_input_embeddings().weight.shape[0] == len(tokenizer)
