"""The language model of a model of images, taken alone."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, Gemma3Config

from rlcore.spi import ModelError, ModelSpec
from rlcore_model_files.directory import model_problems
from rlcore_torchkit.huggingface.language_model import main, own_name, take_language_model
from rlcore_torchkit.huggingface.models import load_model
from rlcore_torchkit.testing.models import make_tokenizer

TEXT = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 16}
TEXT |= {"num_key_value_heads": 2, "sliding_window": 8, "query_pre_attn_scalar": 16}
VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("images") / "model"
    vocab_size = make_tokenizer(directory)
    config = Gemma3Config(
        text_config={**TEXT, "vocab_size": vocab_size},
        vision_config={**VISION, "patch_size": 14},
        mm_tokens_per_image=4,
        image_token_index=0,
    )
    torch.manual_seed(0)
    AutoModelForImageTextToText.from_config(config, dtype=torch.float32).save_pretrained(directory)
    (directory / "preprocessor_config.json").write_text("{}")
    return directory


def test_it_says_what_the_whole_says_of_text(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match="python -m rlcore_torchkit.huggingface.language_model MODEL DIRECTORY"):
        load_model(ModelSpec(path=str(whole), dtype="float32"), dtype=torch.float32, any_decoder=True)
    alone = tmp_path / "alone"
    monkeypatch.setattr(sys, "argv", ["language_model", str(whole), str(alone)])
    assert main() == 0
    assert main() == 5  # it exists
    assert model_problems(str(alone)) == []
    assert not (alone / "preprocessor_config.json").exists()
    load_model(ModelSpec(path=str(alone), dtype="float32"), dtype=torch.float32, any_decoder=True)
    tokens = torch.arange(1, 12)[None]
    with torch.no_grad():
        expected = AutoModelForImageTextToText.from_pretrained(whole)(input_ids=tokens).logits
        found = AutoModelForCausalLM.from_pretrained(alone)(input_ids=tokens).logits
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0.0)


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("model.language_model.layers.0.x", "model.layers.0.x"),
        ("language_model.model.layers.0.x", "model.layers.0.x"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("lm_head.weight", "lm_head.weight"),
        ("model.text_model.norm.weight", "model.norm.weight"),
        ("llm.model.norm.weight", "model.norm.weight"),
        ("model.visual.blocks.0.x", None),
        ("model.vision_tower.x", None),
        ("model.multi_modal_projector.x", None),
        ("audio_tower.x", None),
    ],
)
def test_names_of_its_tensors(name: str, own: str | None) -> None:
    assert own_name(name) == own


def test_the_whole_model_decides_whether_the_head_is_the_embedding(whole: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(whole, model)
    config = json.loads((model / "config.json").read_text())
    config["text_config"]["tie_word_embeddings"] = False  # which classes of transformers write beside a head that is tied
    (model / "config.json").write_text(json.dumps(config))
    take_language_model(ModelSpec(path=str(model), dtype="float32"), tmp_path / "alone")
    assert json.loads((tmp_path / "alone" / "config.json").read_text())["tie_word_embeddings"] is True


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text_config": None}, "no text_config or"),
        ({"text_config": {"model_type": "none"}}, "a language model of model_type none"),
        ({"text_config": {**TEXT, "model_type": "gemma3_text", "num_hidden_layers": 3, "vocab_size": 9}}, "expected 3"),
    ],
)
def test_what_has_none_is_refused_and_leaves_nothing(whole: Path, tmp_path: Path, changes: dict, message: str) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for file in whole.iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    config = json.loads((model / "config.json").read_text()) | changes
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=message):
        take_language_model(ModelSpec(path=str(model), dtype="float32"), tmp_path / "alone")
    assert not (tmp_path / "alone").exists()
