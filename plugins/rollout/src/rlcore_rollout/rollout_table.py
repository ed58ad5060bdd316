"""Samples as a table: what rollouts/*.parquet hold."""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from rlcore.run.protocols import CollectedRollouts
from rlcore.spi import ADVANTAGES, GENERATION_LOGPROBS, WEIGHT_VERSIONS, FinishReason, TokenBatch, Tokenizer
from rlcore.spi.arrays import Float32Array, Int64Array


def rollout_table(
    step: int, collected: CollectedRollouts, prompts: Sequence[str], advantages: Float32Array | None = None
) -> pa.Table:
    """A step's samples as a table, one row a sequence; `tokens` holds prompt and response. `prompts` [N]; `advantages` float32
    [T], a column of their own where there are any."""
    batch = collected.batch
    offsets = pa.array(batch.offsets, pa.int64())
    mask = batch.loss_mask

    def ragged(values: "np.ndarray[tuple[int], np.dtype[np.generic]]") -> pa.Array:
        return pa.LargeListArray.from_arrays(offsets, pa.array(values))

    columns = {} if advantages is None else {ADVANTAGES: ragged(advantages)}
    if batch.sampling_mask is not None:
        kept = pa.LargeListArray.from_arrays(pa.array(batch.sampling_mask.offsets), pa.array(batch.sampling_mask.tokens))
        columns["sampling_mask"] = pa.LargeListArray.from_arrays(offsets, kept)
    return pa.table(
        {
            "step": np.full(batch.num_sequences, step),
            "group": collected.group_ids,
            "episode": collected.episode_of,
            "prompt": list(prompts),
            "response": list(collected.responses),
            "reward": collected.rewards,
            **{f"reward/{name}": column for name, column in collected.reward_components.items()},
            "success": collected.success,
            "valid": collected.valid,
            "finish_reason": [FinishReason(reason).name.lower() for reason in collected.finish_reasons.tolist()],
            "num_generated": collected.num_generated,
            "tokens": ragged(batch.tokens),
            "loss_mask": ragged(mask),
            "generation_logprobs": ragged(batch.token_columns[GENERATION_LOGPROBS]),
            "weight_versions": ragged(batch.token_columns[WEIGHT_VERSIONS]),
            **columns,
        }
    )


def prompt_texts(collected: CollectedRollouts, tokenizer: Tokenizer, sequences: Int64Array | None = None) -> list[str]:
    """Return the prompt of each sample, up to its first generated token: [N], or of some sequences, [M]."""
    batch = collected.batch if sequences is None else collected.batch.select(sequences)
    generated = batch.token_columns[WEIGHT_VERSIONS] >= 0
    prompts = []
    for start, end in zip(batch.offsets[:-1].tolist(), batch.offsets[1:].tolist(), strict=True):
        first = int(generated[start:end].argmax()) if generated[start:end].any() else end - start
        prompts.append(batch.tokens[start : start + first])
    return tokenizer.decode_batch(prompts)


def advantages_of(collected: CollectedRollouts, trained: TokenBatch) -> Float32Array | None:
    """float32 [T]: the advantages of a step's tokens in the batch that it trained on; None where the algorithm has none, or
    trains on other sequences than were sampled."""
    advantages = trained.token_columns.get(ADVANTAGES)
    if advantages is None or not np.array_equal(trained.offsets, collected.batch.offsets):
        return None
    return advantages
