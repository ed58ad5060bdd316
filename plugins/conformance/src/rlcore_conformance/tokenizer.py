"""The tokenizers' part of the conformance kit."""

from pathlib import Path
from typing import cast

import numpy as np
import pytest

from rlcore.config.model import ModelConfig
from rlcore.registry.run_parts import TextEntry
from rlcore.run.data.text import Tokenizers
from rlcore.spi import ModelError, TextProvider, Tokenizer
from rlcore_conformance.text_backends import TextFixtures
from rlcore_torchkit.testing.models import make_tokenizer

TEXTS = ("a", "What is 3 + 4?", " two  spaces ", "line\n\nline\n", "(x*y)=z;", "0123456789")
CHAT = ({"role": "user", "content": "What is 3 + 4?"},)
ANSWER = {"role": "assistant", "content": "7"}


class TokenizerConformance(TextFixtures):
    """Checks of every loader of tokenizers::

        class TestMine(TokenizerConformance):
            @pytest.fixture
            def provider(self): return TEKKEN

    Fixtures to override where the default does not fit: `model` (a directory with a tokenizer of characters in Hugging Face's
    format) and `texts` (of which each token is known).
    """

    role = "tokenizer"

    @pytest.fixture
    def model(self, tmp_path: Path) -> ModelConfig:
        """A model with a tokenizer."""
        make_tokenizer(tmp_path / "model")
        return ModelConfig(path=str(tmp_path / "model"))

    @pytest.fixture
    def texts(self) -> tuple[str, ...]:
        """Texts that come back as they are."""
        return TEXTS

    @pytest.fixture
    def tokenizer(self, provider: TextProvider, model: ModelConfig) -> Tokenizer:
        """The model's tokenizer."""
        return cast("Tokenizers", self.built(provider)).load_tokenizer(model)

    def test_the_description(self, entry: TextEntry) -> None:
        """It has no faults, and its backend is there."""
        assert entry.error is None
        assert entry.unavailable() is None

    def test_a_model_without_a_tokenizer(self, provider: TextProvider, model: ModelConfig, tmp_path: Path) -> None:
        """One in a directory is here. Where there is none, a ModelError says so."""
        loader = cast("Tokenizers", self.built(provider))
        assert loader.is_here(model) is True
        (tmp_path / "empty").mkdir()
        with pytest.raises(ModelError):
            loader.load_tokenizer(ModelConfig(path=str(tmp_path / "empty")))

    def test_texts_come_back(self, tokenizer: Tokenizer, texts: tuple[str, ...]) -> None:
        """`decode` gives the text that was encoded, from a list or an array, and `encode` adds nothing to it."""
        for text in texts:
            tokens = tokenizer.encode(text)
            assert tokenizer.decode(tokens) == tokenizer.decode(np.array(tokens, np.int32)) == text
            assert tokenizer.show(tokens) == text, "encode adds special tokens"
        assert tokenizer.encode("") == []

    def test_batches_are_the_single_calls(self, tokenizer: Tokenizer, texts: tuple[str, ...]) -> None:
        """`encode_batch` and `decode_batch` are `encode` and `decode` of each."""
        encoded = tokenizer.encode_batch(texts)
        assert encoded == [tokenizer.encode(text) for text in texts]
        assert tokenizer.decode_batch(encoded) == [tokenizer.decode(tokens) for tokens in encoded]

    def test_texts_stand_behind_others(self, tokenizer: Tokenizer, texts: tuple[str, ...]) -> None:
        """`encode_behind` brings the tokens with which a text goes on."""
        for text, behind in zip(texts, tokenizer.encode_behind(texts), strict=True):
            assert tokenizer.decode([*tokenizer.encode("Say:"), *behind]) == f"Say:{text}"

    def test_stop_tokens_have_no_text(self, tokenizer: Tokenizer) -> None:
        """Tokens that end a response are no part of its text; `eos_token_id` is one of them."""
        assert tokenizer.stop_token_ids, "no token ends a response"
        assert tokenizer.eos_token_id is None or tokenizer.eos_token_id in tokenizer.stop_token_ids
        for token in tokenizer.stop_token_ids:
            assert tokenizer.decode([*tokenizer.encode("7"), token]) == "7"

    def test_tokens_are_of_the_vocabulary(self, tokenizer: Tokenizer, texts: tuple[str, ...]) -> None:
        """Numbers are below `vocab_size`, and `vocabulary` has those of texts."""
        used = {token for text in texts for token in tokenizer.encode(text)}
        numbers = None if tokenizer.vocabulary is None else {*tokenizer.vocabulary.values()}
        assert numbers is None or used <= numbers, f"the vocabulary lacks {sorted(used - (numbers or set()))}"
        assert tokenizer.vocab_size is None or max(used) < tokenizer.vocab_size

    def test_chats_end_where_the_answer_begins(self, tokenizer: Tokenizer) -> None:
        """A chat with its answer begins as the chat without it, and shows the answer behind that."""
        if tokenizer.chat_template is None:
            pytest.skip("the tokenizer has no chat template")
        prompt, whole = tokenizer.render_chat(CHAT), tokenizer.render_answered([*CHAT, ANSWER])
        assert CHAT[0]["content"] in prompt
        assert whole.startswith(f"{prompt}{ANSWER['content']}"), f"{whole!r} does not go on from {prompt!r}"

    def test_chat_templates_are_saved(self, provider: TextProvider, tokenizer: Tokenizer, tmp_path: Path) -> None:
        """A directory that they are saved to renders chats as this tokenizer does."""
        make_tokenizer(tmp_path / "exported")
        tokenizer.save_chat_templates(tmp_path / "exported", {})
        again = cast("Tokenizers", self.built(provider)).load_tokenizer(ModelConfig(path=str(tmp_path / "exported")))
        assert (again.chat_template, again.render_chat(CHAT)) == (tokenizer.chat_template, tokenizer.render_chat(CHAT))
