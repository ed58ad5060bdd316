"""The answers of rows, as sequences of a step beside the policy's samples."""

from collections.abc import Sequence

import numpy as np
from attrs import evolve

from rlcore import spi
from rlcore.config.data import DatasetConfig
from rlcore.config.recipe import RolloutConfig
from rlcore.run.data.examples import Examples
from rlcore.run.data.text import renderer
from rlcore.spi.arrays import AnyArray, Int32Array, offsets_of
from rlcore_distill.gkd import PART_WEIGHTS, TEACHER_TEXT

FIELDS = ("prompt", "completion", "tools")
"""The fields of a row that its answer is rendered from. Others, such as a whole chat, play no part."""
MAX_PROMPT_TOKENS = 2**31 - 1
"""No bound here: prompts are bounded where they are sampled from."""


class RowAnswers:
    """The answers of the prompts' rows, which the teacher wrote."""

    def __init__(self, max_response_tokens: int) -> None:
        self._limit = max_response_tokens
        self._tokenizer: spi.Tokenizer | None = None

    def read_rows(self, rows: Sequence[spi.Row], tokenizer: spi.Tokenizer) -> None:
        """Render all answers once. DataError names rows without one, or with one over rollout.max_response_tokens."""
        self._tokenizer = tokenizer
        if rows:
            self._rendered(rows)

    def beside(self, rollouts: spi.RolloutBatch, share: float) -> spi.TokenBatch:
        """Add a sequence to each group: its prompt with its row's answer. The columns PART_WEIGHTS and TEACHER_TEXT give the
        samples' mean the weight `share`, and the answers' mean the rest. ConfigError where an episode has several sequences,
        ContractError where samples came without their rows."""
        batch = rollouts.batch
        if not batch.tokens.any():  # the made-up samples of a check, which have no rows
            made_up = batch.with_token_column(TEACHER_TEXT, np.zeros(batch.num_tokens, np.bool_))
            return made_up.with_token_column(PART_WEIGHTS, np.zeros(batch.num_tokens, np.float32))
        if spi.EPISODE_IDS in batch.sequence_columns:
            problem = spi.Problem(
                path="algorithm.distill.lmbda",
                found=f"{share:g}, with an environment whose episodes have several segments",
                expected="1.0, or episodes of one sequence each",
            )
            raise spi.ConfigError([problem])
        firsts = np.flatnonzero(np.diff(rollouts.group_ids, prepend=-1))
        if len(rollouts.rows) != len(firsts):
            raise spi.ContractError(f"found {len(rollouts.rows)} rows for {len(firsts)} groups; expected one for each")
        examples = self._rendered(rollouts.rows)
        answers = [tokens[is_answer] for tokens, is_answer in _by_sequence(examples)]
        prompts = [_prompt(batch, int(first)) for first in firsts]
        written = _joined(batch.select(firsts), prompts, answers)
        order = np.argsort(np.concatenate([rollouts.group_ids, written.sequence_columns[spi.GROUP_IDS]]), kind="stable")
        is_written = np.repeat(np.arange(batch.num_sequences + len(firsts)) >= batch.num_sequences, _lengths(batch, written))
        whole = _concatenated(batch, written)
        counts = [max(int((whole.loss_mask & part).sum()), 1) for part in (~is_written, is_written)]
        weights = np.where(is_written, (1 - share) / counts[1], share / counts[0]) * whole.loss_mask.sum()
        columns = {TEACHER_TEXT: is_written, PART_WEIGHTS: np.where(whole.loss_mask, weights, 0).astype(np.float32)}
        return evolve(whole, token_columns={**whole.token_columns, **columns}).select(order)

    def _rendered(self, rows: Sequence[spi.Row]) -> Examples:
        if self._tokenizer is None:
            raise spi.ContractError("found no tokenizer; expected read_rows to be called before the first step")
        limits = RolloutConfig(max_prompt_tokens=MAX_PROMPT_TOKENS, max_response_tokens=self._limit)
        read = [{name: row[name] for name in FIELDS if name in row} for row in rows]
        return renderer().render_examples(
            read, self._tokenizer, DatasetConfig(), limits, key="data.train", source="demonstrations"
        )


def _by_sequence(examples: Examples) -> list[tuple[Int32Array, AnyArray]]:
    offsets = examples.tokens.offsets
    return list(zip(examples.tokens.sequences(), np.split(examples.learned, offsets[1:-1]), strict=True))


def _prompt(batch: spi.TokenBatch, sequence: int) -> Int32Array:
    """int32 [length]: what a sequence reads before its first generated token."""
    start, end = (int(offset) for offset in batch.offsets[sequence : sequence + 2])
    is_generated = batch.token_columns[spi.WEIGHT_VERSIONS][start:end] >= 0
    length = int(is_generated.argmax()) if is_generated.any() else end - start
    return batch.tokens[start : start + length]


def _joined(like: spi.TokenBatch, prompts: Sequence[Int32Array], answers: Sequence[Int32Array]) -> spi.TokenBatch:
    """A batch of prompts with answers: no token of it was generated. It has the columns and images of the sequences `like`."""
    lengths = [(len(prompt), len(answer)) for prompt, answer in zip(prompts, answers, strict=True)]
    tokens = np.concatenate([part for pair in zip(prompts, answers, strict=True) for part in pair])
    columns = {}
    for name, column in like.token_columns.items():
        unknown = -1 if name in (spi.WEIGHT_VERSIONS, spi.ROUTED_EXPERTS) else 0
        columns[name] = np.full((len(tokens), *column.shape[1:]), unknown, column.dtype)
    return spi.TokenBatch(
        tokens=tokens,
        offsets=offsets_of([sum(pair) for pair in lengths]),
        loss_mask=np.concatenate([np.arange(sum(pair)) >= pair[0] for pair in lengths]),
        token_columns=columns,
        sequence_columns=like.sequence_columns,
        sampling_mask=None if like.sampling_mask is None else spi.SamplingMask.whole(len(tokens)),
        images=like.images,
    )


def _lengths(*batches: spi.TokenBatch) -> AnyArray:
    return np.concatenate([batch.lengths for batch in batches])


def _concatenated(one: spi.TokenBatch, other: spi.TokenBatch) -> spi.TokenBatch:
    """The sequences of both, which have the same columns."""
    masks = [mask for batch in (one, other) if (mask := batch.sampling_mask) is not None]
    return spi.TokenBatch(
        tokens=np.concatenate([one.tokens, other.tokens]),
        offsets=offsets_of(_lengths(one, other)),
        loss_mask=np.concatenate([one.loss_mask, other.loss_mask]),
        token_columns={name: np.concatenate([column, other.token_columns[name]]) for name, column in one.token_columns.items()},
        sequence_columns={
            name: np.concatenate([column, other.sequence_columns[name]]) for name, column in one.sequence_columns.items()
        },
        sampling_mask=spi.SamplingMask.join(masks) if masks else None,
        images=None if one.images is None else (*one.images, *(other.images or ())),
    )
