"""Tokens of rows: prompts checked against the length limit before a run starts, and demonstrations to train on."""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from typing import TypeAlias

import numpy as np
from attrs import frozen

from rlcore import spi
from rlcore.config.recipe import DatasetConfig
from rlcore.run.data.datasets import Split, row_name
from rlcore.run.data.row_fields import COMPLETION, PROMPT, prompt_fault
from rlcore.run.data.tokenizer import Tokenizer
from rlcore.spi.arrays import Int32Array, Int64Array, gather_ragged

CHUNK_ROWS = 2048
Observe: TypeAlias = Callable[[Sequence[spi.Row]], Sequence[spi.Observation]]


@frozen(kw_only=True, eq=False)
class Prompts:
    """P prompts within the limit; all their tokens, 4 bytes each, take about the memory of their text."""

    tokens: spi.RaggedTokens
    """P prompts."""
    rows: Int64Array
    """int64 [P]: the row of the data set that each came from, ascending."""
    num_dropped: int
    """Rows left out since they are over the limit."""


@frozen(kw_only=True, eq=False)
class Demonstrations:
    """N pairs of prompt and completion, each one sequence that ends with the end-of-sequence token."""

    tokens: spi.RaggedTokens
    """N sequences."""
    prompt_lengths: Int64Array
    """int64 [N]: tokens of the prompt, at least 1."""
    rows: Int64Array
    """int64 [N]: the row of the data set that each came from, ascending."""
    num_dropped: int
    """Rows left out since they are over a limit."""


def encode_prompts(prompts: Sequence[spi.Observation], tokenizer: Tokenizer) -> list[Sequence[int]]:
    """Tokens of each prompt. Text is encoded as it is, after the beginning-of-sequence token where the tokenizer's own
    settings want one; messages go through the chat template; tokens stay. DataError where that leaves something out."""
    texts = [
        prompt.text if prompt.messages is None else tokenizer.render_chat(prompt.messages, prompt.tools) for prompt in prompts
    ]
    encoded = iter(tokenizer.encode_batch([text for text in texts if text is not None]))
    prefix = list(tokenizer.prompt_prefix)
    tokens: list[Sequence[int]] = []
    for prompt, text in zip(prompts, texts, strict=True):
        if text is None:
            tokens.append([] if prompt.tokens is None else prompt.tokens.tolist())
            continue
        encoded_prompt = next(encoded)
        starts_right = prompt.messages is not None or encoded_prompt[: len(prefix)] == prefix
        tokens.append(encoded_prompt if starts_right else prefix + encoded_prompt)
    return tokens


def render_prompts(
    rows: Sequence[spi.Row],
    tokenizer: Tokenizer,
    config: DatasetConfig,
    *,
    split: Split,
    max_prompt_tokens: int,
    observe: Observe | None = None,
) -> Prompts:
    """The prompts of all rows as tokens, read in chunks. `observe` gives the prompts that an environment makes of the rows;
    without it they are the rows' own. DataError names a row without a prompt, or over the limit where that is an error."""
    key = f"data.{split}"
    limits = _Limits(key, config, rows)
    pieces = []
    for start, chunk in _chunks(rows):
        kept, numbers = [], []
        for number, tokens in enumerate(_prompt_tokens(rows, chunk, start, key, tokenizer, observe), start=start):
            if limits.admits(number, "prompt", len(tokens), "rollout.max_prompt_tokens", max_prompt_tokens):
                kept.append(tokens)
                numbers.append(number)
        pieces.append(_Piece.of(kept, numbers))
    limits.finish(len(rows))
    joined = _Piece.join(pieces)
    return Prompts(tokens=joined.ragged(), rows=joined.rows, num_dropped=limits.num_over)


def render_demonstrations(
    rows: Sequence[spi.Row],
    tokenizer: Tokenizer,
    config: DatasetConfig,
    *,
    split: Split,
    max_prompt_tokens: int,
    max_response_tokens: int,
) -> Demonstrations:
    """Prompt, completion and end-of-sequence token of all rows. DataError names a row that lacks one of the two, or is over
    a limit where that is an error (the end-of-sequence token counts as part of the completion)."""
    eos = _eos_token(tokenizer)
    key = f"data.{split}"
    limits = _Limits(key, config, rows)
    pieces, lengths = [], []
    for start, chunk in _chunks(rows):
        kept, numbers = [], []
        prompts = _prompt_tokens(rows, chunk, start, key, tokenizer, None)
        completions = tokenizer.encode_behind([_completion(rows, row, start + i, config, key) for i, row in enumerate(chunk)])
        for number, (prompt, completion) in enumerate(zip(prompts, completions, strict=True), start=start):
            response = completion if completion[-1:] == [eos] else [*completion, eos]
            if limits.admits(number, "prompt", len(prompt), "rollout.max_prompt_tokens", max_prompt_tokens) and limits.admits(
                number, "completion", len(response), "rollout.max_response_tokens", max_response_tokens
            ):
                kept.append([*prompt, *response])
                numbers.append(number)
                lengths.append(len(prompt))
        pieces.append(_Piece.of(kept, numbers))
    limits.finish(len(rows))
    joined = _Piece.join(pieces)
    return Demonstrations(
        tokens=joined.ragged(), prompt_lengths=np.asarray(lengths, np.int64), rows=joined.rows, num_dropped=limits.num_over
    )


def demonstration_batch(demonstrations: Demonstrations, indices: Int64Array) -> spi.RolloutBatch:
    """The demonstrations `indices` int64 [M], each a group of its own; loss_mask is True on completion and end."""
    num_sequences = len(indices)
    gather, offsets = gather_ragged(demonstrations.tokens.offsets, indices)
    first_of_completion = demonstrations.tokens.offsets[:-1][indices] + demonstrations.prompt_lengths[indices]
    batch = spi.TokenBatch(
        tokens=demonstrations.tokens.tokens[gather],
        offsets=offsets,
        loss_mask=gather >= np.repeat(first_of_completion, np.diff(offsets)),
        sequence_columns={spi.GROUP_IDS: np.arange(num_sequences, dtype=np.int32)},
    )
    return spi.RolloutBatch(
        batch=batch,
        rewards=np.zeros(num_sequences, np.float32),
        valid=np.ones(num_sequences, np.bool_),
        finish_reasons=np.full(num_sequences, spi.FinishReason.STOP, np.uint8),
    )


@frozen(eq=False)
class _Piece:
    """Token sequences of one chunk, packed."""

    tokens: Int32Array
    lengths: Int64Array
    rows: Int64Array

    @classmethod
    def of(cls, sequences: Sequence[Sequence[int]], rows: Sequence[int]) -> "_Piece":
        lengths = np.asarray([len(sequence) for sequence in sequences], np.int64)
        tokens = np.fromiter(chain.from_iterable(sequences), np.int32, int(lengths.sum()))
        return cls(tokens, lengths, np.asarray(rows, np.int64))

    @classmethod
    def join(cls, pieces: Sequence["_Piece"]) -> "_Piece":
        return cls(
            np.concatenate([piece.tokens for piece in pieces]),
            np.concatenate([piece.lengths for piece in pieces]),
            np.concatenate([piece.rows for piece in pieces]),
        )

    def ragged(self) -> spi.RaggedTokens:
        return spi.RaggedTokens(tokens=self.tokens, offsets=np.concatenate([np.zeros(1, np.int64), np.cumsum(self.lengths)]))


class _Limits:
    """Counts the rows over a limit, and says so where the recipe makes that an error."""

    def __init__(self, key: str, config: DatasetConfig, rows: Sequence[spi.Row]) -> None:
        self.key, self.config, self.rows = key, config, rows
        self.num_over = 0
        self.first = ""

    def admits(self, row: int, part: str, num_tokens: int, option: str, limit: int) -> bool:
        if num_tokens == 0:
            raise spi.DataError(f"{self.key}: the {part} of {row_name(self.rows, row)} has no tokens; expected at least one")
        if num_tokens <= limit:
            return True
        self.num_over += 1
        if not self.first:
            found = f"{row_name(self.rows, row)} has a {part} of {num_tokens} tokens"
            self.first = f"{found}; expected at most {limit} ({option})"
            self.remedy = f'Raise {option}, or leave such rows out with {self.key}.on_long_prompt = "drop"'
        return False

    def finish(self, num_rows: int) -> None:
        if self.num_over and self.config.on_long_prompt == "error":
            others = f"; {self.num_over - 1} more of the {num_rows} rows are over the limit" if self.num_over > 1 else ""
            raise spi.DataError(f"{self.key}: {self.first}{others}. {self.remedy}")
        if self.num_over == num_rows:
            raise spi.DataError(f"{self.key}: all {num_rows} rows are over the limit, so none is left: {self.first}")


def _chunks(rows: Sequence[spi.Row]) -> Iterator[tuple[int, list[spi.Row]]]:
    """The rows in order, so many at a time, each with the number of its first."""
    iterator, start = iter(rows), 0
    while chunk := list(islice(iterator, CHUNK_ROWS)):
        yield start, chunk
        start += len(chunk)


def _prompt_tokens(
    rows: Sequence[spi.Row], chunk: Sequence[spi.Row], start: int, key: str, tokenizer: Tokenizer, observe: Observe | None
) -> list[Sequence[int]]:
    if observe is not None:
        return encode_prompts(observe(chunk), tokenizer)
    return encode_prompts([_row_prompt(rows, row, start + i, key) for i, row in enumerate(chunk)], tokenizer)


def _row_prompt(rows: Sequence[spi.Row], row: spi.Row, number: int, key: str) -> spi.Observation:
    prompt = row.get(PROMPT)
    if fault := prompt_fault(prompt):
        found = f"fields {', '.join(map(repr, row))}" if PROMPT not in row else fault
        raise spi.DataError(f"{key}: {row_name(rows, number)}: found {found}; expected a prompt: text, or chat messages")
    return spi.Observation(text=prompt) if isinstance(prompt, str) else spi.Observation(messages=prompt)


def _completion(rows: Sequence[spi.Row], row: spi.Row, number: int, config: DatasetConfig, key: str) -> str:
    completion = row.get(COMPLETION)
    if isinstance(completion, str):
        return completion
    name, expected = config.completion_field, "expected the completion to learn, as text"
    if COMPLETION in row:
        found = f"{type(completion).__name__} {completion!r:.60}; {expected}"
    else:
        listed = ", ".join(map(repr, row))
        found = f"no field {name!r}, only {listed}; {expected}. Name its field with {key}.completion_field"
    raise spi.DataError(f"{key}: {row_name(rows, number)}: found {found}")


def _eos_token(tokenizer: Tokenizer) -> int:
    if tokenizer.eos_token_id is None:
        problem = spi.Problem(
            path="model.path",
            found="a tokenizer without an end-of-sequence token",
            expected="one, which ends each demonstration",
            remedy="Set eos_token in tokenizer_config.json, or eos_token_id in generation_config.json",
        )
        raise spi.ModelError([problem])
    return tokenizer.eos_token_id
