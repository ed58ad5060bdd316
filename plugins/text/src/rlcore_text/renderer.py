"""Renders rows and chats to tokens for a run: an `rlcore.run.data.text.Renderer`."""

from collections.abc import Sequence

from rlcore.run.data.text import Conversations, EngineParser, History
from rlcore.spi import Tokenizer
from rlcore_text.chats import conversations as episodes
from rlcore_text.chats.tool_calls import ToolParser
from rlcore_text.chats.tool_calls import tool_forms as tool_forms
from rlcore_text.rows.datasets import load_rows as load_rows
from rlcore_text.rows.given_rows import given_rows as given_rows
from rlcore_text.rows.learned import render_examples as render_examples
from rlcore_text.rows.prompts import encode_prompts as encode_prompts
from rlcore_text.rows.prompts import prompt_images as prompt_images
from rlcore_text.rows.prompts import render_prompts as render_prompts
from rlcore_text.rows.row_fields import prompt_fault as prompt_fault
from rlcore_text.rows.row_fields import reply_fault as reply_fault


def conversations(tokenizer: Tokenizer, stop_token_ids: Sequence[int], history: History = "segment") -> Conversations:
    """Return what keeps the conversations of episodes."""
    return episodes.Conversations(tokenizer, stop_token_ids, history)


def tool_parser(name: str, chat_template: str | None, engine: EngineParser | None = None) -> ToolParser | None:
    """Return the parser that `rollout.tool_parser` names; see ToolParser.named."""
    return ToolParser.named(name, chat_template, engine)
