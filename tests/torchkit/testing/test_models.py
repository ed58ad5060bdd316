"""Small models: a token per byte, and weights that follow from the seed alone."""

import json
from pathlib import Path

import pytest

from rlcore_model_files.directory import model_problems
from rlcore_torchkit.testing.models import END_OF_TEXT, make_model, make_tokenizer


@pytest.mark.parametrize(("alphabet", "num_symbols"), [("0123456789", 10), ("aab", 2), ("aä€", 1 + 2 + 3), ("", 0)])
def test_the_vocabulary_is_the_bytes_of_the_alphabet_and_two_special_tokens(
    tmp_path: Path, alphabet: str, num_symbols: int
) -> None:
    number = make_tokenizer(tmp_path / "new" / "folder", alphabet)
    written = json.loads((tmp_path / "new" / "folder" / "tokenizer.json").read_text())
    assert number == num_symbols + 2 == len(written["model"]["vocab"])
    assert written["model"]["vocab"][END_OF_TEXT] == 0


def test_texts_of_the_alphabet_come_back_and_the_end_is_one_token(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    make_tokenizer(tmp_path, "aä€ ")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    text = " a€ä  a"
    tokens = tokenizer.encode(text)
    assert len(tokens) == len(text.encode())
    assert tokenizer.decode(tokens) == text
    assert tokenizer.encode(END_OF_TEXT) == [0]
    messages = [{"role": "user", "content": "a"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == "user: a\nassistant: "


def test_weights_follow_from_the_seed_and_leave_torchs_own_draws_alone(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    torch.manual_seed(5)
    expected = torch.rand(2)
    torch.manual_seed(5)
    contents = {}
    for name, seed in (("one", 3), ("same", 3), ("other", 4)):
        directory = make_model(tmp_path / name, seed=seed, num_layers=1, hidden_size=16, num_heads=2, alphabet="ab")
        assert model_problems(str(directory)) == []
        contents[name] = (directory / "model.safetensors").read_bytes()
    assert contents["one"] == contents["same"] != contents["other"]
    assert torch.equal(torch.rand(2), expected)


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_is_of_the_sizes_that_were_asked_for(tmp_path: Path, tied: bool) -> None:
    pytest.importorskip("torch")
    directory = make_model(
        tmp_path, "qwen2", num_layers=3, hidden_size=16, num_heads=4, num_kv_heads=1, tied=tied, max_length=9
    )
    config = json.loads((directory / "config.json").read_text())
    found = {key: config[key] for key in ("model_type", "num_hidden_layers", "hidden_size", "num_key_value_heads")}
    assert found == {"model_type": "qwen2", "num_hidden_layers": 3, "hidden_size": 16, "num_key_value_heads": 1}
    assert (config["tie_word_embeddings"], config["max_position_embeddings"]) == (tied, 9)
    assert json.loads((directory / "generation_config.json").read_text())["eos_token_id"] == 0
    size = (directory / "model.safetensors").stat().st_size
    assert ("lm_head.weight" in (directory / "model.safetensors").read_bytes()[:10_000].decode("latin-1")) != tied
    assert size > 4 * 3 * 16 * 16
