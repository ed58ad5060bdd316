"""The renderer's part of the conformance kit, with the tokenizer of the fakes."""

from typing import Any

import numpy as np
import pytest

from rlcore.config.data import DatasetConfig
from rlcore.config.recipe import RolloutConfig
from rlcore.registry.run_parts import TextEntry
from rlcore.run.data.text import Renderer
from rlcore.spi import ConfigError, DataError, Observation, TextProvider
from rlcore.testing.fakes import FakeTokenizer
from rlcore_conformance.text_backends import TextFixtures

CHAT = [{"role": "user", "content": "more"}]
ROLLOUT = RolloutConfig(max_prompt_tokens=16, max_response_tokens=16)
ROWS: list[dict[str, Any]] = [
    {"prompt": "abc:", "completion": "e", "chosen": "e", "rejected": "f"},
    {"prompt": "a longer prompt:", "completion": "eee", "chosen": "eee", "rejected": "a"},
    {"prompt": "bc:", "completion": "ee", "chosen": "ee", "rejected": "ab"},
]


class RendererConformance(TextFixtures):
    """Checks of every renderer::

    class TestMine(RendererConformance):
        @pytest.fixture
        def provider(self): return PLAIN
    """

    role = "renderer"

    @pytest.fixture
    def tokenizer(self) -> FakeTokenizer:
        """A tokenizer of characters."""
        return FakeTokenizer()

    @pytest.fixture
    def renderer(self, provider: TextProvider) -> Renderer:
        """The renderer under test."""
        made: Renderer = self.built(provider)
        return made

    def test_the_description(self, entry: TextEntry) -> None:
        """It has no faults, and its backend is there."""
        assert entry.error is None
        assert entry.unavailable() is None

    def test_prompts_are_their_rows(self, renderer: Renderer, tokenizer: FakeTokenizer) -> None:
        """Each row's prompt is its field, in the order of the rows; a chat goes through the template."""
        found = renderer.render_prompts(ROWS, tokenizer, DatasetConfig(), key="data.train", max_prompt_tokens=16)
        assert (found.rows.tolist(), found.num_dropped) == ([0, 1, 2], 0)
        expected = [tokenizer.encode(row["prompt"]) for row in ROWS]
        assert [one.tolist() for one in np.split(found.tokens.tokens, found.tokens.offsets[1:-1])] == expected
        observations = [Observation(text=row["prompt"]) for row in ROWS]
        assert [list(one) for one in renderer.encode_prompts(observations, tokenizer)] == expected
        (chat,) = renderer.encode_prompts([Observation(messages=CHAT)], tokenizer)
        assert tokenizer.decode(list(chat)) == tokenizer.render_chat(CHAT)

    def test_long_prompts_are_dropped_or_refused(self, renderer: Renderer, tokenizer: FakeTokenizer) -> None:
        """As `on_long_prompt` says: the numbers of the rows that stay are those of the data set."""
        options: dict[str, Any] = {"key": "data.train", "max_prompt_tokens": 4}
        found = renderer.render_prompts(ROWS, tokenizer, DatasetConfig(on_long_prompt="drop"), **options)
        assert (found.rows.tolist(), found.num_dropped) == ([0, 2], 1)
        with pytest.raises(DataError):
            renderer.render_prompts(ROWS, tokenizer, DatasetConfig(), **options)

    @pytest.mark.parametrize(
        ("source", "fields"), [("demonstrations", ("completion",)), ("preferences", ("chosen", "rejected"))]
    )
    def test_answers_are_learned(
        self, renderer: Renderer, tokenizer: FakeTokenizer, source: Any, fields: tuple[str, ...]
    ) -> None:
        """Behind each row's prompt its answers and their ends, which alone are learned; of two, the chosen one first."""
        found = renderer.render_examples(ROWS, tokenizer, DatasetConfig(), ROLLOUT, key="data.train", source=source)
        assert found.rows.tolist() == [0, 1, 2]
        assert np.diff(found.row_offsets).tolist() == [len(fields)] * 3
        offsets = found.tokens.offsets
        for number, (row, name) in enumerate((row, name) for row in ROWS for name in fields):
            tokens = found.tokens.tokens[offsets[number] : offsets[number + 1]]
            learned = found.learned[offsets[number] : offsets[number + 1]]
            assert tokenizer.decode(tokens) == row["prompt"] + row[name]
            assert tokens[learned].tolist() == [*tokenizer.encode(row[name]), tokenizer.eos_token_id]

    def test_rows_without_a_field_are_refused(self, renderer: Renderer, tokenizer: FakeTokenizer) -> None:
        """A DataError begins with the section of the data set."""
        with pytest.raises(DataError, match="data.train"):
            renderer.render_prompts([{"text": "a"}], tokenizer, DatasetConfig(), key="data.train", max_prompt_tokens=4)
        with pytest.raises(DataError, match="data.train"):
            renderer.given_rows([], DatasetConfig(source="python"), "data.train")

    def test_what_is_a_prompt(self, renderer: Renderer) -> None:
        """A text and messages are prompts; a number is none. An assistant's message is no reply to a turn."""
        assert (renderer.prompt_fault("abc"), renderer.prompt_fault(CHAT), renderer.reply_fault(CHAT)) == (None, None, None)
        assert renderer.prompt_fault(5)
        assert renderer.reply_fault([{"role": "assistant", "content": "more"}])
        assert renderer.prompt_images(CHAT) == ()

    def test_conversations_go_on(self, renderer: Renderer, tokenizer: FakeTokenizer) -> None:
        """Each episode reads what its environment shows next; one that has ended is forgotten, a saved one goes on."""
        kept, again = (renderer.conversations(tokenizer, tokenizer.stop_token_ids) for _ in range(2))
        kept.begin([0, 1], Observation(text="abc:"))
        kept.add_turn(0, "e", tokenizer.eos_token_id)
        kept.end(1)
        assert (0 in kept, 1 in kept) == (True, False)
        again.restore(0, kept.state(0))
        for conversations in (kept, again):
            (read,) = conversations.read([0], [Observation(text=" more:")])
            assert not isinstance(read, DataError)
            tokens, begins_segment = read
            assert (tokenizer.decode(tokens), begins_segment) == (" more:", False)

    def test_parsers_are_named(self, renderer: Renderer) -> None:
        """Every form that it lists is one of `tool_parser`; "auto" finds none in no template, and another name is refused."""
        assert all(renderer.tool_parser(name, None) is not None for name in renderer.tool_forms())
        assert renderer.tool_parser("auto", None) is None
        with pytest.raises(ConfigError):
            renderer.tool_parser("no such form", None)
