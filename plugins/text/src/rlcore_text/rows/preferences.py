"""Preferences: rows with a prompt, a chosen and a rejected answer, as text or as chats through the template.

Chats have the form of HuggingFaceH4's and TRL's data sets: whole conversations that differ in their last message, the
assistant's, or a prompt of messages with the answers' messages alone.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from attrs import evolve, frozen

from rlcore import spi
from rlcore.config.data import DatasetConfig
from rlcore.run.data.examples import Examples
from rlcore.schema.types import is_number
from rlcore.spi import Tokenizer
from rlcore_text.chats.conversation import behind_prompt, opened_prompt
from rlcore_text.chats.images import image_parts
from rlcore_text.chats.messages import ASSISTANT, IN_LOSS, read_messages, thought_of
from rlcore_text.rows.rendering import KeptRows, encode_prompt_texts, end_token, ended
from rlcore_text.rows.row_fields import prompt_fault, tools_beside
from rlcore_text.tokenizers.turn_ends import ended_answer, require_shown, turn_end

EXPECTED = "be learned from as preferences; expected a prompt with a chosen and a rejected answer"


def render_preferences(
    rows: Sequence[spi.Row],
    tokenizer: Tokenizer,
    config: DatasetConfig,
    *,
    key: str,
    max_prompt_tokens: int,
    max_response_tokens: int,
) -> Examples:
    """Each row's prompt with its chosen answer, and with its rejected one; an answer ends with the token that ends it, which
    counts as part of it. DataError names the rows that are no such pair, and one over a limit where that is an error."""
    eos, margins = end_token(tokenizer), dict[int, float]()
    kept = KeptRows(key, config, rows, EXPECTED)
    for start, chunk in kept.chunks():
        pairs: dict[int, _Pair] = {}
        for number, row in enumerate(chunk, start=start):
            try:
                pairs[number] = _pair_of(row, tokenizer, config)
                margins[number] = 0.0 if config.margin_field is None else _margin_of(row, config.margin_field)
            except spi.DataError as error:
                kept.faults.add(number, str(error))
        prompts = encode_prompt_texts(
            [pair.prompt for pair in pairs.values()], [pair.is_chat for pair in pairs.values()], tokenizer
        )
        answers = tokenizer.encode_behind([text for pair in pairs.values() for text in (pair.chosen, pair.rejected)])
        for index, (number, pair) in enumerate(pairs.items()):
            both = [ended(tokens, tokenizer, eos, is_chat=pair.is_chat) for tokens in answers[2 * index : 2 * index + 2]]
            if both[0] == both[1]:
                kept.faults.add(number, "both answers are the same tokens; expected two that differ")
            else:
                kept.keep_answers(number, prompts[index], both, "longer answer", (max_prompt_tokens, max_response_tokens))
    examples = kept.examples(answers=2)
    if config.margin_field is None:
        return examples
    return evolve(examples, margins=np.array([margins[row] for row in examples.rows.tolist()], np.float32))


@frozen(kw_only=True)
class _Pair:
    """A row in text."""

    prompt: str
    chosen: str
    rejected: str
    """The rejected answer, which follows the prompt."""
    is_chat: bool
    """True where a chat template wrote it."""


def _pair_of(row: spi.Row, tokenizer: Tokenizer, config: DatasetConfig) -> _Pair:
    """The row's texts; DataError says why it has none."""
    for side, name in (("chosen", config.chosen_field), ("rejected", config.rejected_field)):
        if row.get(name) is None:
            found = f"null as {name!r}" if name in row else f"no field {name!r}, only {', '.join(map(repr, row)) or 'none'}"
            raise spi.DataError(f"found {found}; expected the {side} answer (data.*.{side}_field)")
    chosen, rejected = row[config.chosen_field], row[config.rejected_field]
    prompt = row.get(config.prompt_field)
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise spi.DataError("one answer is text, the other is not; expected two texts, or two lists of chat messages")
    pair = _text_pair if isinstance(chosen, str) else _chat_pair
    return pair(prompt, chosen, rejected, tools_beside(prompt if isinstance(chosen, str) else None, row), tokenizer)


def _margin_of(row: spi.Row, name: str) -> float:
    value: Any = row.get(name)
    if not is_number(value):
        found = f"{value!r:.40} as {name!r}" if name in row else f"no field {name!r}"
        raise spi.DataError(f"found {found}; expected a finite number, by how much the chosen answer is better")
    return float(value)


def _text_pair(prompt: Any, chosen: str, rejected: str, tools: Sequence[spi.Tool], tokenizer: Tokenizer) -> _Pair:
    """Answers of plain text, behind a prompt of text or of messages."""
    if prompt is None:
        raise spi.DataError("found no prompt, with answers that are text; expected one (data.*.prompt_field)")
    text, end = prompt, ""
    if not isinstance(prompt, str):
        messages = _messages(prompt, "prompt")
        text, end = "".join(opened_prompt(messages, tokenizer, tools)), turn_end(messages, tools, tokenizer)
    elif fault := prompt_fault(prompt):
        raise spi.DataError(f"found {fault} as its prompt; expected text, or chat messages")
    for side, answer in (("chosen", chosen), ("rejected", rejected)):
        if not answer.strip():
            raise spi.DataError(f"the {side} answer is empty; expected one with text")
    if chosen == rejected:
        raise spi.DataError("both answers are equal; expected two that differ")
    return _Pair(prompt=text, chosen=chosen + end, rejected=rejected + end, is_chat=not isinstance(prompt, str))


def _chat_pair(prompt: Any, chosen: Any, rejected: Any, tools: Sequence[spi.Tool], tokenizer: Tokenizer) -> _Pair:
    """Answers that are messages: the template's text behind the prompt of each."""
    chats = [_conversation(prompt, messages, side) for side, messages in (("chosen", chosen), ("rejected", rejected))]
    common = next((i for i, (one, other) in enumerate(zip(*chats, strict=False)) if one != other), min(map(len, chats)))
    if common == len(chats[0]) == len(chats[1]):
        raise spi.DataError("both answers are equal; expected two that differ")
    if [len(chat) - 1 for chat in chats] != [common, common]:
        raise spi.DataError(
            f"the chosen and the rejected conversation differ from message {common} on (the first is 0) and have "
            f"{len(chats[0])} and {len(chats[1])} messages; expected them to differ in their last message alone"
        )
    begun = chats[0][:common]
    if not begun:
        raise spi.DataError("the two conversations have no message in common; expected the prompt as their beginning")
    if isinstance(prompt, str) and prompt.strip() not in [message["content"].strip() for message in begun]:
        raise spi.DataError(f"none of the messages that both conversations begin with is the prompt {prompt!r:.60}")
    opened = tokenizer.render_chat(begun, tools)
    answers = []
    for chat in chats:
        whole = tokenizer.render_answered(chat, tools)
        require_shown(chat[-1], whole, opened, "an answer")
        answers.append(ended_answer(whole, opened, chat, tools, tokenizer))
    return _Pair(prompt=opened, chosen=answers[0], rejected=answers[1], is_chat=True)


def _conversation(prompt: Any, messages: Any, side: str) -> list[spi.Message]:
    """A whole conversation; DataError where it is none that ends with an answer."""
    chat = _messages([messages] if isinstance(messages, Mapping) else messages, f"{side} answer", may_begin=False)
    if prompt is not None and not isinstance(prompt, str):
        before = _messages(prompt, "prompt")
        chat = chat if chat[: len(before)] == before else behind_prompt(before, chat)
    last = chat[-1]
    if last["role"] != ASSISTANT:
        raise spi.DataError(f"the {side} messages end with one of {last['role']!r}; expected the assistant's answer")
    if not (last["content"].strip() or last.get("tool_calls") or thought_of(last)):
        raise spi.DataError(f"the {side} answer is empty; expected one with text")
    if "weight" in last:
        raise spi.DataError(f"the {side} answer is left out by {', '.join(IN_LOSS)}; expected two answers to compare")
    return chat


def _messages(value: Any, what: str, *, may_begin: bool = True) -> list[spi.Message]:
    """Messages of text alone."""
    try:
        messages = read_messages(value, may_begin=may_begin)
    except spi.DataError as error:
        raise spi.DataError(f"found {error} as its {what}; expected text, or chat messages with role and content") from error
    if any(map(image_parts, messages)):
        raise spi.DataError("found images; expected text alone: preferences between answers to images cannot be learned")
    return messages
