"""A character tokenizer, its prompts and its data sets."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from rlcore.config.model import ModelConfig
from rlcore_text.tokenizers.tokenizer import PretrainedTokenizer, load_tokenizer
from rlcore_torchkit.testing.models import make_tokenizer


@pytest.fixture(scope="session")
def tokenizer_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(directory)
    return directory


@pytest.fixture(scope="session")
def tokenizer(tokenizer_directory: Path) -> PretrainedTokenizer:
    return load_tokenizer(ModelConfig(path=str(tokenizer_directory)))


@pytest.fixture
def write_jsonl(tmp_path: Path) -> Callable[[Sequence[Mapping[str, Any]]], str]:
    def write(rows: Sequence[Mapping[str, Any]]) -> str:
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        return str(path)

    return write
