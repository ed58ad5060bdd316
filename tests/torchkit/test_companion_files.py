"""Files of tokenizers, processors, chat templates and generation belong to a model; others in its folder do not."""

from pathlib import Path

import pytest

from rlcore_torchkit.huggingface.companion_files import companion_names, known_names, own_code

COMPANIONS = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "generation_config.json"),
    *("chat_template.jinja", "chat_template.json", "additional_chat_templates/tool_use.jinja"),
    *("vocab.json", "merges.txt", "vocab.txt", "dict.txt", "emoji.json", "source.spm", "bpe.codes"),
    *("tokenizer.model", "tokenizer.model.v3", "tokenizer.model.v7m1", "sentencepiece.bpe.model", "spiece.model", "spm.model"),
    *("tekken.json", "tekken_240911.json", "tiktoken.model", "own.tiktoken", "tokenizer.4.0.0.json"),
    *("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json", "audio_tokenizer_config.json"),
)
OTHERS = (
    *("config.json", "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "optimizer.pt", "own.py"),
    *("adapter_config.json", "README.md", "trainer_state.json", "hf_quant_config.json", "original/tokenizer.model"),
)


def written(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("{}")
    return folder


def test_what_transformers_reads_beside_weights_belongs_to_a_model(tmp_path: Path) -> None:
    assert sorted(companion_names(written(tmp_path, *COMPANIONS, *OTHERS))) == sorted(COMPANIONS)


def test_so_does_what_a_tokenizers_own_code_names(tmp_path: Path) -> None:
    written(tmp_path, "ice_text.vocab", "unnamed.vocab", "adapter_config.json")
    (tmp_path / "tokenization_own.py").write_text('VOCAB = {"vocab_file": "ice_text.vocab", "x": "adapter_config.json"}')
    assert list(companion_names(tmp_path)) == ["ice_text.vocab"]


def test_the_names_are_those_of_the_installed_tokenizers() -> None:
    from transformers import BertTokenizer, GPT2Tokenizer, T5Tokenizer, XLMRobertaTokenizer

    for kind in (BertTokenizer, GPT2Tokenizer, T5Tokenizer, XLMRobertaTokenizer):
        assert set(kind.vocab_files_names.values()) <= known_names()


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ('{"auto_map": {"AutoTokenizer": ["own.Own", null]}}', {"AutoTokenizer": ["own.Own", None]}),
        ("{}", {}),
        ("[", {}),
        ("[]", {}),
    ],
)
def test_code_of_its_own_is_what_a_file_names(content: str, expected: object, tmp_path: Path) -> None:
    file = tmp_path / "tokenizer_config.json"
    file.write_text(content)
    assert own_code(file) == expected
    assert own_code(tmp_path / "chat_template.jinja") == {}
