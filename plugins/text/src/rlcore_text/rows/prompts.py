"""Tokens of rows: prompts checked against the length limit before a run starts, and demonstrations to train on."""

from collections.abc import Sequence

from rlcore import spi
from rlcore.config.data import DatasetConfig
from rlcore.run.data.examples import Examples
from rlcore.run.data.text import Observe, Prompts, row_name
from rlcore.spi import Tokenizer
from rlcore_text.chats.conversation import opened_prompt
from rlcore_text.chats.images import images_of
from rlcore_text.chats.messages import read_messages, read_tools
from rlcore_text.rows.rendering import KeptRows, encode_prompt_texts, end_token, ended, require_no_image_token
from rlcore_text.rows.row_fields import COMPLETION, PROMPT, read_prompt, tools_beside
from rlcore_text.tokenizers.turn_ends import answer_text


def encode_prompts(prompts: Sequence[spi.Observation], tokenizer: Tokenizer) -> list[Sequence[int]]:
    """Tokens of each prompt. Text is encoded as it is, after the tokens that the tokenizer's own settings put first; messages
    go through the chat template; tokens stay. DataError where that leaves something out."""
    texts = [
        prompt.text if prompt.messages is None else "".join(opened_prompt(prompt.messages, tokenizer, prompt.tools))
        for prompt in prompts
    ]
    rendered = [prompt.messages is not None for prompt, text in zip(prompts, texts, strict=True) if text is not None]
    encoded = iter(encode_prompt_texts([text for text in texts if text is not None], rendered, tokenizer))
    return [
        next(encoded) if text is not None else [] if prompt.tokens is None else prompt.tokens.tolist()
        for prompt, text in zip(prompts, texts, strict=True)
    ]


def prompt_images(messages: str | Sequence[spi.Message] | None) -> tuple[bytes, ...]:
    """The images of a prompt, in order; none of one that is no messages."""
    return () if messages is None or isinstance(messages, str) else images_of(read_messages(messages))


def render_prompts(
    rows: Sequence[spi.Row],
    tokenizer: Tokenizer,
    config: DatasetConfig,
    *,
    key: str,
    max_prompt_tokens: int,
    observe: Observe | None = None,
) -> Prompts:
    """The prompts of all rows of the section `key` as tokens, read in chunks. `observe` gives the prompts that an environment
    makes of the rows; without it they are the rows' own. DataError names a row without a prompt, or over the limit where that
    is an error."""
    kept = KeptRows(key, config, rows)
    for start, chunk in kept.chunks():
        for number, tokens in enumerate(_prompt_tokens(rows, chunk, start, key, tokenizer, observe), start=start):
            if kept.limits.admits(number, "prompt", len(tokens), kept.limits.of_prompts, max_prompt_tokens):
                kept.keep(number, [tokens])
    joined = kept.joined()
    return Prompts(tokens=joined.ragged(), rows=joined.rows, num_dropped=kept.limits.num_over)


def render_demonstrations(
    rows: Sequence[spi.Row],
    tokenizer: Tokenizer,
    config: DatasetConfig,
    *,
    key: str,
    max_prompt_tokens: int,
    max_response_tokens: int,
) -> Examples:
    """Prompt, completion and the token that ends it, of all rows: the chat template's where the prompt is a chat, else the end
    of sequence. DataError names a row that lacks one of the two, or is over a limit where that is an error (the end counts as
    part of the completion)."""
    eos, kept = end_token(tokenizer), KeptRows(key, config, rows)
    for start, chunk in kept.chunks():
        prompts = _prompt_tokens(rows, chunk, start, key, tokenizer, None)
        images = [prompt_images(row[PROMPT]) for row in chunk]
        texts = [_completion(rows, row, start + i, config, key, tokenizer) for i, row in enumerate(chunk)]
        chats = [not isinstance(row[PROMPT], str) for row in chunk]
        completions = tokenizer.encode_behind(texts)
        most = (max_prompt_tokens, max_response_tokens)
        for index, completion in enumerate(completions):
            response = ended(completion, tokenizer, eos, is_chat=chats[index])
            kept.keep_answers(start + index, prompts[index], [response], "completion", most, images[index])
    return kept.examples(answers=1)


def _prompt_tokens(
    rows: Sequence[spi.Row], chunk: Sequence[spi.Row], start: int, key: str, tokenizer: Tokenizer, observe: Observe | None
) -> list[Sequence[int]]:
    own = [] if observe is not None else [_row_prompt(rows, row, start + i, key) for i, row in enumerate(chunk)]
    prompts = own if observe is None else observe(chunk)
    try:
        return encode_prompts(prompts, tokenizer)
    except spi.DataError:
        for number, prompt in enumerate(prompts, start=start):
            try:
                encode_prompts([prompt], tokenizer)
            except spi.DataError as error:
                raise spi.DataError(f"{key}: {row_name(rows, number)}: {error}") from error
        raise


def _row_prompt(rows: Sequence[spi.Row], row: spi.Row, number: int, key: str) -> spi.Observation:
    try:
        prompt = read_prompt(row.get(PROMPT))
        tools = tools_beside(prompt, row)
    except spi.DataError as error:
        found = f"fields {', '.join(map(repr, row))}" if PROMPT not in row else error
        raise spi.DataError(
            f"{key}: {row_name(rows, number)}: found {found}; expected a prompt: text, or chat messages"
        ) from error
    return spi.Observation(text=prompt) if isinstance(prompt, str) else spi.Observation(messages=prompt, tools=tools)


def _completion(
    rows: Sequence[spi.Row], row: spi.Row, number: int, config: DatasetConfig, key: str, tokenizer: Tokenizer
) -> str:
    """The text to learn behind the row's prompt."""
    completion = row.get(COMPLETION)
    if isinstance(completion, str) and completion.strip():
        try:
            require_no_image_token(completion, tokenizer)
            if isinstance(row[PROMPT], str):
                return completion
            messages, tools = read_messages(row[PROMPT]), read_tools(row.get("tools"))
            opened = "".join(opened_prompt(messages, tokenizer, tools))
            return answer_text(messages, completion, opened, tools, tokenizer)
        except spi.DataError as error:
            raise spi.DataError(f"{key}: {row_name(rows, number)}: {error}") from error
    name, expected = config.completion_field, "expected the completion to learn, as text"
    if isinstance(completion, str):
        found = f"an empty completion; {expected}. Leave the row out: the policy would learn to say nothing"
    elif COMPLETION in row:
        found = f"{type(completion).__name__} {completion!r:.60}; {expected}"
    else:
        listed = ", ".join(map(repr, row))
        found = f"no field {name!r}, only {listed}; {expected}. Name its field with {key}.completion_field"
    raise spi.DataError(f"{key}: {row_name(rows, number)}: found {found}")
