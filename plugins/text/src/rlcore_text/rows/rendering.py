"""Renders rows of a data set to packed tokens in chunks, for prompts, demonstrations and preferences."""

from collections.abc import Iterator, Sequence
from itertools import chain

import numpy as np
from attrs import frozen

from rlcore import spi
from rlcore.config.data import DatasetConfig
from rlcore.run.data.examples import Examples
from rlcore.run.data.mixes import chunks_of
from rlcore.run.data.text import row_name
from rlcore.spi import Tokenizer
from rlcore.spi.arrays import Int32Array, Int64Array, offsets_of

MAX_SHOWN = 8
"""Rows that an error names."""


def encode_prompt_texts(texts: Sequence[str], rendered: Sequence[bool], tokenizer: Tokenizer) -> list[Sequence[int]]:
    """Tokens of each prompt: as they are where a chat template `rendered` it, and otherwise after those that the tokenizer's
    own settings put first, such as the beginning of a sequence."""
    for text, is_whole in zip(texts, rendered, strict=True):
        if not is_whole:
            require_no_image_token(text, tokenizer)
    prefix = list(tokenizer.prompt_prefix)
    encoded = tokenizer.encode_batch(texts)
    return [
        tokens if is_whole or tokens[: len(prefix)] == prefix else prefix + tokens
        for tokens, is_whole in zip(encoded, rendered, strict=True)
    ]


def require_no_image_token(text: str, tokenizer: Tokenizer) -> None:
    """Refuse, with a DataError, a text with the token that stands for a part of an image in a model of images."""
    token = getattr(tokenizer, "image_token", None)
    if token is not None and token in text:
        raise spi.DataError(f"a text has {token!r}, which stands for a part of an image; expected chat messages with the image")


def end_token(tokenizer: Tokenizer) -> int:
    """The token that ends an answer to learn; ModelError where the tokenizer has none."""
    if tokenizer.eos_token_id is None:
        problem = spi.Problem(
            path="model.path",
            found="a tokenizer without an end-of-sequence token",
            expected="one, which ends each answer to learn",
            remedy="Set eos_token in tokenizer_config.json, or eos_token_id in generation_config.json",
        )
        raise spi.ModelError([problem])
    return tokenizer.eos_token_id


def ended(answer: Sequence[int], tokenizer: Tokenizer, eos: int, *, is_chat: bool) -> list[int]:
    """An answer's tokens with the one that ends it: in a chat the template's own, where it has one, and else `eos`. Templates
    such as Phi's end a conversation with a second such token, which the policy would never come to: it is left out."""
    ends, end = tokenizer.stop_token_ids if is_chat else (eos,), len(answer)
    for index, token in reversed([*enumerate(answer)] if is_chat else []):
        if token in ends:
            end = index + 1
        elif tokenizer.decode([token]).strip():
            break
    return list(answer[:end]) if answer[:end][-1:] and answer[end - 1] in ends else [*answer, eos]


@frozen(eq=False)
class TokenPiece:
    """Token sequences of one chunk, packed."""

    tokens: Int32Array
    lengths: Int64Array
    rows: Int64Array
    """int64: the row of the data set that each entry came from."""

    @classmethod
    def of(cls, sequences: Sequence[Sequence[int]], rows: Sequence[int]) -> "TokenPiece":
        """Pack lists of tokens."""
        lengths = np.asarray([len(sequence) for sequence in sequences], np.int64)
        tokens = np.fromiter(chain.from_iterable(sequences), np.int32, int(lengths.sum()))
        return cls(tokens, lengths, np.asarray(rows, np.int64))

    @classmethod
    def join(cls, pieces: Sequence["TokenPiece"]) -> "TokenPiece":
        """All of them, one after another."""
        return cls(
            np.concatenate([piece.tokens for piece in pieces]),
            np.concatenate([piece.lengths for piece in pieces]),
            np.concatenate([piece.rows for piece in pieces]),
        )

    def ragged(self) -> spi.RaggedTokens:
        """The sequences."""
        return spi.RaggedTokens(tokens=self.tokens, offsets=offsets_of(self.lengths))


class Limits:
    """Counts the rows over a limit, and says so where the recipe makes that an error."""

    def __init__(self, key: str, config: DatasetConfig, rows: Sequence[spi.Row]) -> None:
        """`key` is the data set's section of the recipe."""
        self.key, self.config, self.rows = key, config, rows
        self.section = key.partition(".mix.")[0]
        """The section that has the limits of all sets of a mix."""
        own = config.max_prompt_tokens is not None
        self.of_prompts = f"{self.section}.max_prompt_tokens" if own else "rollout.max_prompt_tokens"
        """The option that bounds prompts."""
        self.num_over = 0
        self.first = ""

    def admits(self, row: int, part: str, num_tokens: int, option: str, limit: int) -> bool:
        """Return whether a part of a row is within the limit that `option` sets. DataError where it has no tokens."""
        if num_tokens == 0:
            raise spi.DataError(f"{self.key}: the {part} of {row_name(self.rows, row)} has no tokens; expected at least one")
        if num_tokens <= limit:
            return True
        self.num_over += 1
        if not self.first:
            found = f"{row_name(self.rows, row)} has a {part} of {num_tokens} tokens"
            self.first = f"{found}; expected at most {limit} ({option})"
            self.remedy = f'Raise {option}, or leave such rows out with {self.section}.on_long_prompt = "drop"'
        return False

    def finish(self, num_rows: int) -> None:
        """DataError where a row was over a limit and the recipe makes that an error, and where none is left."""
        if self.num_over and self.config.on_long_prompt == "error":
            others = f"; {self.num_over - 1} more of the {num_rows} rows are over the limit" if self.num_over > 1 else ""
            raise spi.DataError(f"{self.key}: {self.first}{others}. {self.remedy}")
        if self.num_over == num_rows:
            raise spi.DataError(f"{self.key}: all {num_rows} rows are over the limit, so none is left: {self.first}")


class Faults:
    """The rows that cannot be learned from, told all at once."""

    def __init__(self, key: str, config: DatasetConfig, rows: Sequence[spi.Row], expected: str) -> None:
        """`key` is the data set's section of the recipe, `expected` goes on from "... rows of FILE cannot"."""
        self.key, self.config, self.rows, self.expected = key, config, rows, expected
        self.number = 0
        self.shown: list[str] = []

    def add(self, row: int, fault: str) -> None:
        """Note what is wrong with a row."""
        self.number += 1
        if len(self.shown) < MAX_SHOWN:
            self.shown.append(f"\n  {row_name(self.rows, row)}: {fault}")

    def finish(self, num_rows: int) -> None:
        """DataError where there are any."""
        if self.number:
            where = "the environment's rows" if self.config.path is None else f"{self.config.path}"
            others = f"\n  and {self.number - len(self.shown)} more" if self.number > len(self.shown) else ""
            raise spi.DataError(
                f"{self.key}: {self.number} of {num_rows} rows of {where} cannot {self.expected}:{''.join(self.shown)}{others}"
            )


class KeptRows:
    """Gathers what is kept of a data set's rows, a chunk at a time, and says at the end what is wrong with the others."""

    def __init__(self, key: str, config: DatasetConfig, rows: Sequence[spi.Row], expected: str = "") -> None:
        """`key` is the data set's section of the recipe; `expected` as in Faults."""
        self.limits, self.faults = Limits(key, config, rows), Faults(key, config, rows, expected)
        self._rows = rows
        self._pieces: list[TokenPiece] = []
        self._sequences: list[Sequence[int]] = []
        self._numbers: list[int] = []
        self._prompt_lengths: list[int] = []
        self._images: list[tuple[bytes, ...]] = []

    def chunks(self) -> Iterator[tuple[int, list[spi.Row]]]:
        """The rows as by `chunks_of`. DataError at their end, where there are faults, or rows over a limit that the recipe
        makes an error."""
        for start, chunk in chunks_of(self._rows, self.limits.key):
            yield start, chunk
            self._pieces.append(TokenPiece.of(self._sequences, self._numbers))
            self._sequences, self._numbers = [], []
        self.faults.finish(len(self._rows))
        self.limits.finish(len(self._rows))

    def keep(self, number: int, sequences: Sequence[Sequence[int]], images: Sequence[tuple[bytes, ...]] = ()) -> None:
        """Keep a row's token sequences, and the images of each where there are any."""
        self._sequences += sequences
        self._numbers.append(number)
        self._images += images or [()] * len(sequences)

    def keep_answers(
        self,
        number: int,
        prompt: Sequence[int],
        answers: Sequence[Sequence[int]],
        part: str,
        most: tuple[int, int],
        images: tuple[bytes, ...] = (),
    ) -> None:
        """Keep a row's answers, each behind its prompt, unless prompt or longest answer, which errors call `part`, have more
        tokens than `most` says of the two."""
        longest = max(map(len, answers))
        if self.limits.admits(number, "prompt", len(prompt), self.limits.of_prompts, most[0]) and self.limits.admits(
            number, part, longest, "rollout.max_response_tokens", most[1]
        ):
            self.keep(number, [[*prompt, *answer] for answer in answers], [images] * len(answers))
            self._prompt_lengths += [len(prompt)] * len(answers)

    def joined(self) -> TokenPiece:
        """Return all kept rows as one piece."""
        return TokenPiece.join(self._pieces)

    @property
    def images(self) -> spi.Images | None:
        """The images of each sequence that was kept; None where there are none."""
        return tuple(self._images) if any(self._images) else None

    def examples(self, *, answers: int) -> Examples:
        """Return the rows that `keep_answers` kept, so many answers of each."""
        joined = self.joined()
        return Examples.behind_prompts(
            joined.ragged(),
            np.asarray(self._prompt_lengths, np.int64),
            answers=answers,
            rows=joined.rows,
            num_dropped=self.limits.num_over,
            images=self.images,
        )
