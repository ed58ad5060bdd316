"""Renders the answers of rows to learn from: chats, demonstrations, labelled completions or preferences."""

from collections.abc import Sequence
from typing import Literal

from rlcore.config.data import DatasetConfig
from rlcore.config.recipe import RolloutConfig
from rlcore.run.data.examples import Examples
from rlcore.spi import ConfigError, Problem, Row, Tokenizer
from rlcore_text.rows.assistant_masked_chats import are_chats, render_chats
from rlcore_text.rows.labelled import render_labelled
from rlcore_text.rows.preferences import render_preferences
from rlcore_text.rows.prompts import render_demonstrations


def render_examples(
    rows: Sequence[Row],
    tokenizer: Tokenizer,
    config: DatasetConfig,
    rollout: RolloutConfig,
    *,
    key: str,
    source: Literal["rollouts", "demonstrations", "preferences", "labelled"],
) -> Examples:
    """The answers of rows of the section `key`. DataError names rows that have none."""
    if source == "demonstrations" and are_chats(rows, config):
        if config.max_prompt_tokens is not None:
            section = key.partition(".mix.")[0]
            found, expected = (
                f"{config.max_prompt_tokens}, with whole chats to learn",
                "no such key: a chat is bounded as a whole",
            )
            raise ConfigError([Problem(path=f"{section}.max_prompt_tokens", found=found, expected=expected)])
        most = rollout.max_sequence_length
        return render_chats(rows, tokenizer, config, key=key, max_tokens=most, history=rollout.history)
    render = {"preferences": render_preferences, "labelled": render_labelled}.get(source, render_demonstrations)
    return render(
        rows,
        tokenizer,
        config,
        key=key,
        max_prompt_tokens=config.max_prompt_tokens or rollout.max_prompt_tokens,
        max_response_tokens=rollout.max_response_tokens,
    )
