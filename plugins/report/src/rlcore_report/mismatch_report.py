"""The samples on which generator and trainer disagree most, written down: a table to analyse, and a text to read."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from rlcore.files import storage_errors, write_atomically
from rlcore.reading import write_parquet
from rlcore.run.observers import ObservedRun
from rlcore.run.protocols import LoopObserver
from rlcore.spi import GENERATION_LOGPROBS, GROUP_IDS, WEIGHT_VERSIONS, TokenBatch, Tokenizer
from rlcore.spi.arrays import Float32Array
from rlcore_report.worst_samples import WorstSamples

MAX_SHOWN_SAMPLES, MAX_SHOWN_TOKENS, MAX_SHOWN_CHARACTERS = 3, 8, 400


class MismatchReport(LoopObserver):
    """Keeps the worst samples of a run in its folder `logprob_mismatch`."""

    def __init__(self, run: ObservedRun) -> None:
        self._directory, self._tokenizer = run.directory.path / "logprob_mismatch", run.tokenizer

    def save_logprob_mismatch(
        self, step: int, heading: str, batch: TokenBatch, trainer_logprobs: Float32Array, trainer_version: int
    ) -> str:
        """See DisagreementWriter."""
        worst = WorstSamples.of(batch, trainer_logprobs, trainer_version)
        path = save_logprob_mismatch(self._directory, step, heading, worst, self._tokenizer)
        where = f"The worst samples are in {path} and, to read, in {path.with_suffix('.txt').name}."
        return f"Worst token: {worst.describe_worst_token()}. {where}"


def save_logprob_mismatch(directory: Path, step: int, heading: str, worst: WorstSamples, tokenizer: Tokenizer) -> Path:
    """Write step-N.parquet and step-N.txt into `directory`; the path of the first."""
    path = directory / f"step-{step:06d}.parquet"
    with storage_errors("the worst samples", directory):
        directory.mkdir(exist_ok=True)
        write_parquet(_table(step, worst, tokenizer), path)
    write_atomically(path.with_suffix(".txt"), "\n".join(_lines(heading, path.name, worst, tokenizer)) + "\n")
    return path


def _table(step: int, worst: WorstSamples, tokenizer: Tokenizer) -> pa.Table:
    """One row a sample; columns of the same name are those of the rollouts."""
    batch = worst.batch
    offsets = pa.array(batch.offsets, pa.int64())
    prompts, responses = _texts(batch, tokenizer)
    per_token: dict[str, Any] = {
        "tokens": batch.tokens,
        "loss_mask": batch.loss_mask,
        GENERATION_LOGPROBS: batch.token_columns[GENERATION_LOGPROBS],
        "trainer_logprobs": worst.trainer_logprobs,
        "differences": worst.differences,
        WEIGHT_VERSIONS: batch.token_columns[WEIGHT_VERSIONS],
    }
    return pa.table(
        {
            "step": np.full(batch.num_sequences, step),
            "rank": np.arange(1, batch.num_sequences + 1),
            "group": _groups(batch),
            "prompt": prompts,
            "response": responses,
            "token_mult_prob_error": worst.errors,
            "worst_position": worst.worst_positions,
            "trainer_version": np.full(batch.num_sequences, worst.trainer_version),
            **{name: pa.LargeListArray.from_arrays(offsets, pa.array(values)) for name, values in per_token.items()},
        }
    )


def _lines(heading: str, table: str, worst: WorstSamples, tokenizer: Tokenizer) -> Iterator[str]:
    yield heading
    yield f"{worst.batch.num_sequences} samples, worst first, are in {table}. The tokens of the first that differ most:"
    prompts, responses = _texts(worst.batch, tokenizer)
    for index, group in enumerate(_groups(worst.batch)[:MAX_SHOWN_SAMPLES]):
        where = "" if group is None else f", group {group}"
        yield f"\nsample {index + 1}{where}: mean exp(|difference|) is {worst.errors[index]:.4g}"
        yield f"  prompt:   {_shortened(prompts[index])}"
        yield f"  response: {_shortened(responses[index])}"
        yield f"  {'position':>8}  {'version':>7}  {'generator':>10}  {'trainer':>10}  {'difference':>10}  token"
        yield from _token_lines(worst, index, tokenizer)


def _token_lines(worst: WorstSamples, index: int, tokenizer: Tokenizer) -> Iterator[str]:
    """The tokens of a sample that differ most, in their order; a probability of each in generator and trainer."""
    batch = worst.batch
    start, end = batch.offsets[index : index + 2].tolist()
    positions = np.flatnonzero(batch.loss_mask[start:end])
    order = np.argsort(-np.abs(worst.differences[start + positions]), kind="stable")
    for position in np.sort(positions[order[:MAX_SHOWN_TOKENS]]).tolist():
        at = start + position
        version = batch.token_columns[WEIGHT_VERSIONS][at]
        generation, trainer = np.exp(batch.token_columns[GENERATION_LOGPROBS][at]), np.exp(worst.trainer_logprobs[at])
        token = f"{batch.tokens[at]} {tokenizer.decode(batch.tokens[at : at + 1])!r}"
        numbers = f"{generation:>10.4g}  {trainer:>10.4g}  {worst.differences[at]:>+10.4f}"
        yield f"  {position:>8}  {version:>7}  {numbers}  {token}"


def _texts(batch: TokenBatch, tokenizer: Tokenizer) -> tuple[list[str], list[str]]:
    """[S] each: what comes before a sample's first loss token, and the rest."""
    sequences = np.split(batch.tokens, batch.offsets[1:-1])
    firsts = [int(mask.argmax()) for mask in np.split(batch.loss_mask, batch.offsets[1:-1])]
    prompts = [tokens[:first] for tokens, first in zip(sequences, firsts, strict=True)]
    responses = [tokens[first:] for tokens, first in zip(sequences, firsts, strict=True)]
    return tokenizer.decode_batch(prompts), tokenizer.decode_batch(responses)


def _groups(batch: TokenBatch) -> Sequence[int | None]:
    groups = batch.sequence_columns.get(GROUP_IDS)
    return [None] * batch.num_sequences if groups is None else groups.tolist()


def _shortened(text: str) -> str:
    """Return the text on one line, without its middle where it is long."""
    half = MAX_SHOWN_CHARACTERS // 2
    return repr(text if len(text) <= MAX_SHOWN_CHARACTERS else f"{text[:half]} … {text[-half:]}")
