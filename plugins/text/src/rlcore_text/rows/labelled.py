"""Labelled completions: rows with a prompt, a completion, and whether it is desirable."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from attrs import evolve

from rlcore import spi
from rlcore.config.data import DatasetConfig
from rlcore.run.data.examples import Examples
from rlcore.run.data.mixes import chunks_of
from rlcore.spi import RaggedTokens, Tokenizer
from rlcore.spi.arrays import Float32Array, offsets_of
from rlcore_text.rows.prompts import render_demonstrations
from rlcore_text.rows.rendering import Faults

EXPECTED = "be learned from as labelled completions; expected true or false for each"
_TEXTS = {"true": True, "false": False}
"""Labels of sources that hold texts alone, such as CSV."""


def render_labelled(
    rows: Sequence[spi.Row],
    tokenizer: Tokenizer,
    config: DatasetConfig,
    *,
    key: str,
    max_prompt_tokens: int,
    max_response_tokens: int,
) -> Examples:
    """Each row's prompt with its completion, and then with the completion of the kept row before it; the first row takes the
    last one's. DataError names the rows without a label, and what `render_demonstrations` refuses."""
    labels = _labels(rows, config, key)
    own = render_demonstrations(
        rows, tokenizer, config, key=key, max_prompt_tokens=max_prompt_tokens, max_response_tokens=max_response_tokens
    )
    num_rows = len(own.rows)
    if num_rows == 1:
        raise spi.DataError(f"{key}: found one row; expected two or more, whose prompts and completions are paired otherwise")
    answer_lengths = np.add.reduceat(own.learned, own.tokens.offsets[:-1], dtype=np.int64)
    sequences = own.tokens.sequences()
    prompts = [tokens[: len(tokens) - length] for tokens, length in zip(sequences, answer_lengths.tolist(), strict=True)]
    answers = [tokens[len(prompt) :] for tokens, prompt in zip(sequences, prompts, strict=True)]
    pairs = [
        np.concatenate([prompt, answer])
        for number, prompt in enumerate(prompts)
        for answer in (answers[number], answers[number - 1])
    ]
    tokens = RaggedTokens(tokens=np.concatenate(pairs), offsets=offsets_of([len(one) for one in pairs]))
    paired = Examples.behind_prompts(
        tokens,
        np.repeat([len(prompt) for prompt in prompts], 2),
        answers=2,
        rows=own.rows,
        num_dropped=own.num_dropped,
        images=None if own.images is None else tuple(files for files in own.images for _ in range(2)),
    )
    return evolve(paired, rewards=np.repeat(labels[own.rows], 2))


def _labels(rows: Sequence[spi.Row], config: DatasetConfig, key: str) -> Float32Array:
    """float32 [R]: 1.0 for a desirable completion, else 0.0, of every row."""
    faults, labels = Faults(key, config, rows, EXPECTED), list[float]()
    for _, chunk in chunks_of(rows, key):
        for row in chunk:
            label = _label_of(row.get(config.label_field))
            if label is None:
                name = config.label_field
                found = f"{row[name]!r:.40} as {name!r}" if name in row else f"no field {name!r}"
                faults.add(len(labels), f"found {found}; expected true or false (data.*.label_field)")
            labels.append(float(bool(label)))
    faults.finish(len(labels))
    return np.asarray(labels, np.float32)


def _label_of(value: Any) -> bool | None:
    """Return the label; None where it is none."""
    if isinstance(value, str):
        return _TEXTS.get(value.strip().lower())
    return bool(value) if isinstance(value, bool | np.bool_) else None
