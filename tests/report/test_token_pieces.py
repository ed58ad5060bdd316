"""Where the text of an answer is cut: the pieces together read as the whole, whatever the tokenizer puts between tokens."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcore.config.model import ModelConfig
from rlcore.run.storage.saved_run import SavedRun
from rlcore.spi import ModelError, Problem
from rlcore_report.token_pieces import TokenPieces, pieces_of

from .made_runs import make_run


class Bytes:
    """A token for each byte: what most characters beyond ASCII look like to byte-level tokenizers."""

    def show(self, tokens: list[int]) -> str:
        return bytes(tokens).decode(errors="replace")


class Words:
    """A space between tokens and none in front of the first one, as SentencePiece's tokenizers have it."""

    def show(self, tokens: list[int]) -> str:
        return " ".join(f"w{token}" for token in tokens)


def cutter(tokenizer: Any) -> TokenPieces:
    return TokenPieces(tokenizer)


@given(text=st.text(alphabet="aé→😀\n", min_size=1, max_size=12))
def test_a_characters_bytes_are_shown_together(text: str) -> None:
    tokens = list(text.encode())
    pieces = cutter(Bytes()).pieces(97, tokens)
    assert len(pieces) == len(tokens)
    assert "".join(pieces) == text


def test_bytes_that_never_make_a_character_are_shown_as_such() -> None:
    pieces = cutter(Bytes()).pieces(None, [0xFF, 97, 0xE2, 0x86])
    assert len(pieces) == 4
    assert "".join(pieces).replace("\ufffd", "") == "a"


def test_the_space_before_a_word_is_its_own() -> None:
    assert cutter(Words()).pieces(7, [1, 2]) == [" w1", " w2"]
    assert cutter(Words()).pieces(None, [1, 2]) == ["w1", " w2"]


def test_a_tokenizer_that_rewrites_what_stands_before_is_asked_for_the_token_alone() -> None:
    odd = SimpleNamespace(show=lambda tokens: "".join(map(str, reversed(tokens))))
    assert cutter(odd).pieces(1, [2, 3]) == ["2", "3"]


def test_why_there_is_no_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(model: ModelConfig) -> None:
        raise ModelError([Problem(path="model.path", found=f"{model.path}, without a tokenizer", expected="one")])

    monkeypatch.setattr("rlcore_text.loading.load_tokenizer", refuse)
    run = SavedRun.find(make_run(tmp_path / "run", 2))
    assert pieces_of(run) == (None, "the recipe names no model")
    for other in ("model = 1", "model = [1]", "model.path = 1", "[other]"):
        (run.path / "recipe.toml").write_text(other)
        assert pieces_of(run) == (None, "the recipe names no model")
    (run.path / "recipe.toml").write_text('[model]\npath = "gone"\n')
    assert pieces_of(run) == (None, "model.path: found gone, without a tokenizer")


@pytest.fixture
def with_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SavedRun:
    run = SavedRun.find(make_run(tmp_path / "run", 2))
    (run.path / "model").mkdir()
    monkeypatch.setattr("rlcore_text.loading.load_tokenizer", lambda model: model)
    return run


def test_the_exported_model_comes_first_and_none_of_its_code_runs(with_model: SavedRun) -> None:
    found, reason = pieces_of(with_model)
    assert reason == ""
    model: Any = found and found.tokenizer
    assert (model.path, model.trust_remote_code) == (str(with_model.model), False)
