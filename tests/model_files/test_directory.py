"""Faults of a model directory are found from its files alone."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from hypothesis import given
from hypothesis import strategies as st

from rlcore.spi import Problem
from rlcore_model_files.directory import eos_token_ids, is_hub_name, model_problems, stored_shapes


def safetensors(num_bytes: int = 8, name: str = "w", bits: str = "U8", **others: Any) -> bytes:
    """A file of one tensor of so many bytes."""
    numbers = num_bytes * 8 // int(bits.lstrip("ABCDEFGHIJKLMNOPQRSTUVWXYZ"))
    header = json.dumps({name: {"dtype": bits, "shape": [numbers], "data_offsets": [0, num_bytes]}, **others}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(num_bytes)


TOKENIZER = {"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": 2, "content": "<end>"}]}
SOUND: dict[str, Any] = {
    "config.json": {"vocab_size": 3},
    "generation_config.json": {"eos_token_id": [2, 0]},
    "model.safetensors": safetensors(),
    "tokenizer.json": TOKENIZER,
    "tokenizer_config.json": {},
}
INDEX = {"metadata": {}, "weight_map": {"x": "a.safetensors", "y": "b.safetensors", "z": "c.safetensors"}}


@pytest.fixture
def model(tmp_path: Path):
    """Makes a directory of a sound model with some files changed; None takes one out."""

    def make(**changes: Any) -> Path:
        files = SOUND | {name.replace("__", "."): content for name, content in changes.items()}
        for name, content in files.items():
            if isinstance(content, bytes):
                (tmp_path / name).write_bytes(content)
            elif content is not None:
                (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content))
        return tmp_path

    return make


def test_a_sound_model_has_no_problems(model) -> None:
    directory = str(model())
    assert model_problems(directory) == []
    assert model_problems(f"{directory}/") == []


def test_tokens_are_those_of_the_text_model(model) -> None:
    assert model_problems(str(model(config__json={"vocab_size": 2, "text_config": {"vocab_size": 3}}))) == []


def test_optional_files_may_be_missing(model) -> None:
    assert model_problems(str(model(generation_config__json=None, tokenizer_config__json=None))) == []


VOCABULARIES = (
    "tokenizer.model",
    "tokenizer.model.v3",
    "sentencepiece.bpe.model",
    "spiece.model",
    "tiktoken.model",
    "tekken.json",
)


@pytest.mark.parametrize("files", [*((name,) for name in VOCABULARIES), ("vocab.txt",), ("vocab.json", "merges.txt")])
def test_a_tokenizer_may_be_of_other_files(model, files: tuple[str, ...]) -> None:
    directory = model(tokenizer__json=None, **{name.replace(".", "__"): "" for name in files})
    assert model_problems(str(directory)) == []
    (directory / files[-1]).unlink()
    (problem,) = model_problems(str(directory))
    assert problem.found == "no tokenizer"


def test_the_shapes_of_tensors_are_those_of_the_file_or_the_files_of_the_index(model) -> None:
    directory = model()
    assert stored_shapes(directory) == {"w": (8,)}
    (directory / "model.safetensors.index.json").write_text(json.dumps(INDEX))
    (directory / "a.safetensors").write_bytes(safetensors(4, "x"))
    (directory / "b.safetensors").write_bytes(b"damaged")
    assert stored_shapes(directory) == {"x": (4,)}
    (directory / "model.safetensors.index.json").write_text("{}")
    assert stored_shapes(directory) == {}


def test_shards_are_those_of_the_index(model) -> None:
    shards = {f"{file}.safetensors": safetensors(4, name) for file, name in zip("abc", "xyz", strict=True)}
    directory = model(model__safetensors=None, **{"model.safetensors.index.json": INDEX}, **shards)
    assert model_problems(str(directory)) == []
    (directory / "b.safetensors").unlink()
    (directory / "c.safetensors").write_bytes(b"")
    missing, empty = model_problems(str(directory))
    assert (missing.path, missing.found) == (str(directory), "no b.safetensors")
    assert (empty.path, empty.found) == (str(directory / "c.safetensors"), "0 bytes")


@pytest.mark.parametrize(
    ("changes", "file", "found"),
    [
        ({"config__json": None}, ".", "no config.json"),
        ({"config__json": "{"}, "config.json", "no valid JSON ("),
        ({"config__json": "[" * 100_000}, "config.json", "no valid JSON ("),
        ({"config__json": []}, "config.json", "list"),
        ({"config__json": b"\xff"}, "config.json", "no valid JSON ("),
        ({"model__safetensors": None}, ".", "no weights"),
        ({"model.safetensors.index.json": {}}, "model.safetensors.index.json", "no weight_map"),
        ({"model.safetensors.index.json": "{"}, "model.safetensors.index.json", "no valid JSON ("),
        ({"model__safetensors": safetensors()[:-1]}, "model.safetensors", f"{len(safetensors()) - 1} bytes"),
        ({"model__safetensors": safetensors() + b"x"}, "model.safetensors", f"{len(safetensors()) + 1} bytes, more than"),
        ({"model__safetensors": b"\xff" * 8}, "model.safetensors", "a header that is none of safetensors"),
        ({"model__safetensors": struct.pack("<Q", 4) + b"text"}, "model.safetensors", "a header that is none of safetensors"),
        ({"model__safetensors": struct.pack("<Q", 2) + b"[]"}, "model.safetensors", "a header that is none of safetensors"),
        *(
            ({"model__safetensors": content}, "model.safetensors", "a header that is none of safetensors")
            for content in (
                safetensors(__metadata__={"format": 1}),
                safetensors(__metadata__=["pt"]),
                *(safetensors(bits=bits) for bits in ("X32", "BF32", "F1", "I4", "BOOL8", "BF8")),
            )
        ),
        ({"model__safetensors": "version https://git-lfs.github.com/spec/v1\n"}, "model.safetensors", "a pointer of Git LFS"),
        ({"tokenizer__json": None}, ".", "no tokenizer"),
        ({"tokenizer__json": "{"}, "tokenizer.json", "no valid JSON ("),
        ({"tokenizer_config__json": []}, "tokenizer_config.json", "list"),
        ({"config__json": {"vocab_size": 1}}, "tokenizer.json", "the token 'b' of number 1 and 1 more"),
        (
            {"tokenizer__json": {"model": {"vocab": [["a", -1.0], ["b", -2.0], ["c", 0], ["d", 0]]}}},
            "tokenizer.json",
            "the token 'd' of number 3",
        ),
        (
            {"tokenizer_config__json": {"added_tokens_decoder": {"2": {"content": "<in>"}, "99": {"content": "<out>"}}}},
            "tokenizer_config.json",
            "the token '<out>' of number 99",
        ),
        ({"generation_config__json": "{"}, "generation_config.json", "no valid JSON ("),
        ({"generation_config__json": {"eos_token_id": ["<end>"]}}, "generation_config.json", 'eos_token_id = ["<end>"]'),
    ],
)
def test_each_defect_is_one_problem_of_its_file(model, changes: dict[str, Any], file: str, found: str) -> None:
    directory = model(**changes)
    (problem,) = model_problems(str(directory))
    assert problem.path == str(directory / file)
    assert problem.found.startswith(found)
    assert problem.expected


def test_all_defects_are_reported_at_once(model) -> None:
    assert len(model_problems(str(model(config__json="{", model__safetensors=None, tokenizer__json=None)))) == 3


def test_odd_forms_of_a_tokenizer_are_left_to_its_library(model) -> None:
    odd = {"model": {"vocab": {"a": "0"}}, "added_tokens": [3, {"id": None}], "added_tokens_decoder": {"x": 3, "7": "y"}}
    assert model_problems(str(model(tokenizer__json=odd))) == []
    assert model_problems(str(model(config__json={"vocab_size": "3"}, tokenizer__json=TOKENIZER))) == []


@pytest.mark.parametrize("name", ["Qwen/Qwen3-0.6B", "gpt2", "org_1/some.model-v2"])
def test_a_name_on_the_hub_is_looked_up_later(name: str) -> None:
    assert is_hub_name(name)
    assert model_problems(name) == []


def test_what_is_beside_the_process_does_not_matter_to_a_name_on_the_hub(tmp_path: Path, monkeypatch) -> None:
    """Paths in a recipe start from its own folder, and are absolute where that has what they name."""
    (tmp_path / "Qwen").mkdir()
    monkeypatch.chdir(tmp_path)
    assert model_problems("Qwen/Qwen3-0.6B") == []


@pytest.mark.parametrize("path", ["./gpt2", "/models/x", "a/b/c", "~nobody-here/x", "", "with space", ".hidden", "runs/old"])
def test_what_can_only_be_a_path_has_to_be_there(path: str) -> None:
    assert not is_hub_name(path)


LONG = ("a" * 96, "a" * 97, "a/" + "b" * 96)


@given(path=st.text("aB0-._/ é", max_size=12) | st.sampled_from(["a.git", "a/b.git", "a.git/b", "a\n", *LONG]))
def test_a_name_is_one_by_the_hubs_own_rules(path: str) -> None:
    try:
        validate_repo_id(path)
    except HFValidationError:
        assert not is_hub_name(path)
    else:
        assert is_hub_name(path)


def test_what_is_no_directory_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    found = [model_problems(str(tmp_path / name))[0] for name in ("missing", "file")]
    assert [problem.found for problem in found] == ["no such directory", "a file"]
    assert [problem.path for problem in found] == [str(tmp_path / "missing"), str(tmp_path / "file")]


@pytest.mark.parametrize(("written", "expected"), [(2, (2,)), ([2, 0], (2, 0)), (None, ()), ([], ())])
def test_tokens_that_end_a_text_are_one_or_several(tmp_path: Path, written: Any, expected: tuple[int, ...]) -> None:
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps({} if written is None else {"eos_token_id": written}))
    assert eos_token_ids(file) == expected


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"eos_token_id": [3, 4], "text_config": {"eos_token_id": 5}}, (3, 4)),
        ({"eos_token_id": None, "text_config": {"eos_token_id": [5, 6]}}, (5, 6)),
        ({"text_config": {"eos_token_id": 5}}, (5,)),
        ({"decoder": {"eos_token_id": 7}, "text_config": {"eos_token_id": 5}}, (7,)),
        ({"text_config": None}, ()),
    ],
)
def test_a_models_config_lists_them_itself_or_for_its_text(tmp_path: Path, config: Any, expected: tuple[int, ...]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert eos_token_ids(tmp_path / "config.json") == expected


@pytest.mark.parametrize("has_generation", [False, True])
def test_a_config_that_lists_no_tokens_is_a_problem_where_it_counts(model, has_generation: bool) -> None:
    files = {} if has_generation else {"generation_config__json": None}
    found = model_problems(str(model(config__json={"eos_token_id": "x", "vocab_size": 99}, **files)))
    assert [problem.found for problem in found] == ([] if has_generation else ['eos_token_id = "x"'])


@pytest.mark.parametrize("written", [True, "2", [2, None], 1.5])
def test_what_is_no_token_ends_nothing(tmp_path: Path, written: Any) -> None:
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps({"eos_token_id": written}))
    found = eos_token_ids(file)
    assert isinstance(found, Problem)
    assert found.path == str(file)


@pytest.mark.parametrize(
    "name",
    [
        *("model.safetensors.index.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json"),
        *(
            "added_tokens.json",
            "chat_template.jinja",
            "adapter_config.json",
            "config.json",
            "model.safetensors",
            "spiece.model",
        ),
        "additional_chat_templates/tool_use.jinja",
    ],
)
def test_a_link_that_leads_nowhere_is_no_file_that_is_missing(model, name: str) -> None:
    directory = model(**{name.replace(".", "__"): None})
    (directory / name).parent.mkdir(exist_ok=True)
    (directory / name).symlink_to("gone")
    assert [(problem.path, problem.found) for problem in model_problems(str(directory))] == [
        (str(directory / name), "a link that leads nowhere (gone)")
    ]


def test_a_link_beside_the_model_may_lead_nowhere(model) -> None:
    directory = model()
    (directory / "README.md").symlink_to("gone")
    assert model_problems(str(directory)) == []
