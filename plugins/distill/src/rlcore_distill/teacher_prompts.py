"""The samples' sequences behind a teacher's prompts, in which another text stands in place of the question."""

from collections.abc import Callable, Sequence

import numpy as np

from rlcore import spi
from rlcore.spi.arrays import Int32Array, offsets_of

Retold = str | None
"""The teacher's text in place of a sequence's question; None where the teacher reads the policy's prompt."""


class TeacherPrompts:
    """Puts texts in place of the questions of prompts, by the run's tokenizer."""

    def __init__(self, section: str, max_prompt_tokens: int) -> None:
        self._section, self._limit = section, max_prompt_tokens
        self._tokenizer: spi.Tokenizer | None = None

    @property
    def tokenizer(self) -> spi.Tokenizer:
        """The run's tokenizer. ContractError before it is known."""
        if self._tokenizer is None:
            raise spi.ContractError("found no tokenizer; expected read_rows to be called before the first step")
        return self._tokenizer

    @tokenizer.setter
    def tokenizer(self, tokenizer: spi.Tokenizer) -> None:
        self._tokenizer = tokenizer

    def batch(self, rollouts: spi.RolloutBatch, retold: Callable[[int, str], Retold]) -> spi.TokenBatch:
        """The sequences of the samples, each behind its teacher's prompt, with the loss mask and the kept tokens of truncated
        sampling. `retold` is called with the number of a sequence and its question. DataError where a prompt does not hold its
        row's question, or is longer than rollout.max_prompt_tokens; PluginError for images; ConfigError where an episode has
        several sequences."""
        batch = rollouts.batch
        self._require_plain(batch)
        rows = rows_of_sequences(rollouts)
        known: dict[tuple[bytes, str], Int32Array] = {}
        tokens, masks, kept = list[Int32Array](), list[np.ndarray](), list[spi.SamplingMask]()
        for number, length in enumerate(prompt_lengths(batch)):
            start, end = (int(offset) for offset in batch.offsets[number : number + 2])
            prompt = batch.tokens[start : start + length]
            head, question, tail = self._divided(prompt, rows[number])
            if (text := retold(number, question)) is not None:
                key = (prompt.tobytes(), text)
                if key not in known:
                    known[key] = np.array(self.tokenizer.encode(head + text + tail), np.int32)
                    self._require_short(known[key])
                prompt = known[key]
            tokens += [prompt, batch.tokens[start + length : end]]
            masks += [np.zeros(len(prompt), np.bool_), batch.loss_mask[start + length : end]]
            if batch.sampling_mask is not None:
                kept += [spi.SamplingMask.whole(len(prompt)), batch.sampling_mask.slice(start + length, end)]
        return spi.TokenBatch(
            tokens=np.concatenate(tokens),
            offsets=offsets_of([len(one) + len(rest) for one, rest in zip(tokens[::2], tokens[1::2], strict=True)]),
            loss_mask=np.concatenate(masks),
            sampling_mask=spi.SamplingMask.join(kept) if kept else None,
        )

    def require_room(self, rows: Sequence[spi.Row], retold: Callable[[spi.Row, str], str], num_more: int = 0) -> None:
        """DataError where a teacher's text alone, with `num_more` tokens, is longer than rollout.max_prompt_tokens."""
        asked = [(row, question) for row in rows if (question := question_of(row)) is not None]
        texts = [retold(row, question) for row, question in asked]
        longest = max(map(len, self.tokenizer.encode_batch(texts)), default=0) + num_more
        if longest > self._limit:
            raise self._too_long(longest)

    def _divided(self, prompt: Int32Array, row: spi.Row) -> tuple[str, str, str]:
        """The text of a prompt before its question, the question, and the text behind it."""
        shown = self.tokenizer.show(prompt)
        if (question := question_of(row)) is None:
            return "", shown, ""
        head, found, tail = shown.rpartition(question)
        if not found:
            raise spi.DataError(
                f"{self._section}: found the prompt {shown!r:.200}; expected one that holds its row's question "
                f"{question!r:.100}, in whose place the teacher reads another text"
            )
        return head, question, tail

    def _require_short(self, prompt: Int32Array) -> None:
        if len(prompt) > self._limit:
            raise self._too_long(len(prompt))

    def _too_long(self, length: int) -> spi.DataError:
        return spi.DataError(
            f"{self._section}: found a prompt of {length} tokens for the teacher; expected at most {self._limit} "
            f"(rollout.max_prompt_tokens). Raise rollout.max_prompt_tokens, or shorten demonstrations and templates"
        )

    def _require_plain(self, batch: spi.TokenBatch) -> None:
        if batch.images is not None:
            raise spi.PluginError(
                f"{self._section}: found prompts with images; expected text, which the teacher's prompt is of"
            )
        if spi.EPISODE_IDS in batch.sequence_columns:
            problem = spi.Problem(
                path="environment.name",
                found="an environment with an episode in several segments",
                expected=f"episodes of one sequence each, for {self._section}",
            )
            raise spi.ConfigError([problem])


def rows_of_sequences(rollouts: spi.RolloutBatch) -> list[spi.Row]:
    """[N]: the row of each sequence. ContractError where the samples came without their rows."""
    groups, group_of = np.unique(rollouts.group_ids, return_inverse=True)
    if len(rollouts.rows) != len(groups):
        raise spi.ContractError(f"found {len(rollouts.rows)} rows for {len(groups)} groups; expected one for each")
    return [rollouts.rows[group] for group in group_of.tolist()]


def prompt_lengths(batch: spi.TokenBatch) -> list[int]:
    """[N]: tokens of each sequence before the first generated one; all of them where none is."""
    generated = batch.token_columns[spi.WEIGHT_VERSIONS] >= 0
    parts = np.split(generated, batch.offsets[1:-1])
    return [int(part.argmax()) if part.any() else len(part) for part in parts]


def question_of(row: spi.Row) -> str | None:
    """The text of a row's prompt, or of the last user message in it, without white space around it; None where there is none,
    such as in rows that an environment makes a prompt of."""
    prompt = row.get("prompt")
    if isinstance(prompt, str):
        return prompt.strip() or None
    for message in reversed(prompt or ()):
        if message.get("role") == "user":
            content = message.get("content")
            parts = [{"text": content}] if isinstance(content, str) else content or ()
            texts = [str(part["text"]).strip() for part in parts if part.get("text")]
            return texts[-1] or None if texts else None
    return None
