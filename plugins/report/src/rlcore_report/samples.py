"""Data of a report on a run's samples: quantiles of rewards and lengths, and some samples to read."""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

import numpy as np
import pyarrow as pa

from rlcore.run.storage.saved_run import Float64Array, Kind, SavedRun
from rlcore.spi import GENERATION_LOGPROBS
from rlcore_report.curves import evenly, rounded
from rlcore_report.token_pieces import TokenPieces

MAX_SPREAD_STEPS, NUM_BINS = 60, 24
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
MAX_STEPS, MAX_GROUPS, MAX_GROUP_SAMPLES = 12, 8, 8
MAX_TOKENS, MAX_LAST_TOKENS = 400, 100
MAX_PROMPT_CHARACTERS = 4000
NATS = 100
"""Log-probabilities are told in hundredths of a nat."""
MAX_VALUE = 1e300
"""Values from here on are left out, as infinite ones are: their differences may be infinite."""
SPREADS = {"reward": "reward", "num_generated": "response length (tokens)"}


def spreads(run: SavedRun) -> list[dict[str, Any]]:
    """Return how rewards and lengths of valid samples spread over the steps whose samples were kept: five quantiles of each,
    and counts in bins that all steps share."""
    steps = evenly(run.saved_steps(), MAX_SPREAD_STEPS)
    tables = [(step, run.samples(step).select([*SPREADS, "valid"])) for step in steps]
    return [found for name, label in SPREADS.items() if (found := _spread(name, label, tables))]


def _spread(name: str, label: str, tables: Sequence[tuple[int, pa.Table]]) -> dict[str, Any]:
    of_steps = {}
    for step, table in tables:
        values = table[name].to_numpy().astype(np.float64)[table["valid"].to_numpy()]
        values = values[np.abs(values) < MAX_VALUE]
        if values.size:
            of_steps[step] = values
    if not of_steps:
        return {}
    every = np.concatenate(list(of_steps.values()))
    edges = _edges(every)
    return {
        "label": label,
        "steps": list(of_steps),
        "low": rounded(float(edges[0])),
        "high": rounded(float(edges[-1])),
        "counts": [np.histogram(values, edges)[0].tolist() for values in of_steps.values()],
        "quantiles": [[rounded(float(value)) for value in np.quantile(values, QUANTILES)] for values in of_steps.values()],
    }


def _edges(values: Float64Array) -> Float64Array:
    """The bounds of bins for values; of whole numbers, each bin holds as many."""
    low, high = float(values.min()), float(values.max())
    if (values == np.round(values)).all():
        width = math.ceil((high - low + 1) / NUM_BINS)
        num = math.ceil((high - low + 1) / width)
        return low - 0.5 + width * np.arange(num + 1, dtype=np.float64)
    return np.linspace(low, high, NUM_BINS + 1)


def readable(run: SavedRun, cutter: TokenPieces | None, max_bytes: int) -> list[dict[str, Any]]:
    """Samples to read, by step and group, of `max_bytes` about: of steps that are evenly spread, and of the last evaluation."""
    chosen: list[tuple[Kind, int]] = [("step", step) for step in evenly(run.saved_steps(), MAX_STEPS)]
    chosen += [("evaluation", step) for step in run.saved_steps("evaluation")[-1:]]
    share = max_bytes // max(1, len(chosen))
    return [_of_step(run, kind, step, cutter, share) for kind, step in chosen]


def _of_step(run: SavedRun, kind: Kind, step: int, cutter: TokenPieces | None, max_bytes: int) -> dict[str, Any]:
    table = run.samples(step) if kind == "step" else run.answers(step)
    groups, left = list[dict[str, Any]](), max_bytes
    for number, members in groupby(_rows(table), itemgetter("group")):
        if len(groups) == MAX_GROUPS:
            break
        first, *others = members
        prompt = _without_middle(first["prompt"])
        left -= len(prompt.encode(errors="replace"))
        samples = list[dict[str, Any]]()
        for row in (first, *others[: MAX_GROUP_SAMPLES - 1]):
            sample, size = _sample(row, cutter)
            left -= size
            if left < 0 and (groups or samples):
                break
            samples.append(sample)
        if samples:
            groups.append({"group": number, "prompt": prompt, "samples": samples})
        if left < 0:
            break
    shown = sum(len(group["samples"]) for group in groups)
    return {"kind": kind, "step": step, "num_samples": table.num_rows, "num_shown": shown, "groups": groups}


def _rows(table: pa.Table) -> Iterator[Mapping[str, Any]]:
    """A table's rows, read as they are asked for: a step may have more samples than are shown."""
    for batch in table.to_batches(max_chunksize=MAX_GROUP_SAMPLES):
        yield from batch.to_pylist()


def _sample(row: Mapping[str, Any], cutter: TokenPieces | None) -> tuple[dict[str, Any], int]:
    """A sample as it is shown, and about how many bytes it takes."""
    tokens, mask, logprobs = row["tokens"], row["loss_mask"], row[GENERATION_LOGPROBS]
    begin = mask.index(True) if True in mask else len(tokens)
    places = _places(begin, len(tokens))
    left_out = len(tokens) - begin - len(places)
    told = [_hundredths(logprobs[place]) if mask[place] else None for place in places]
    pieces = None
    if cutter is not None:
        before = tokens[begin - 1] if begin else None
        head = [place for place in places if place - begin < MAX_TOKENS - MAX_LAST_TOKENS]
        tail = places[len(head) :]
        pieces = cutter.pieces(before, [tokens[place] for place in head])
        pieces += cutter.pieces(tokens[tail[0] - 1], [tokens[place] for place in tail]) if tail else []
    text = "" if pieces is not None else _without_middle(row["response"])
    sample = {
        "reward": _number(row["reward"]),
        "success": row["success"],
        "valid": row["valid"],
        "finish": row["finish_reason"],
        "tokens": row["num_generated"],
        "advantage": _advantage(row),
        "gap": [MAX_TOKENS - MAX_LAST_TOKENS, left_out] if left_out else None,
        "logprobs": told,
        "pieces": pieces,
        "text": text,
    }
    size = 150 + 5 * len(told) + len(text) + sum(len(piece.encode(errors="replace")) + 3 for piece in pieces or ())
    return sample, size


def _places(begin: int, end: int) -> list[int]:
    """Tokens of an answer that are shown: all, or the first and the last ones."""
    if end - begin <= MAX_TOKENS:
        return list(range(begin, end))
    return [*range(begin, begin + MAX_TOKENS - MAX_LAST_TOKENS), *range(end - MAX_LAST_TOKENS, end)]


def _advantage(row: Mapping[str, Any]) -> float | None:
    """The mean advantage of the loss tokens; None where there is none."""
    values = [value for value, counts in zip(row.get("advantages") or (), row["loss_mask"], strict=False) if counts]
    return _number(sum(values) / len(values)) if values else None


def _number(value: float) -> float | None:
    """None for what JSON cannot say."""
    return rounded(value) if math.isfinite(value) else None


def _hundredths(logprob: float) -> int | None:
    return round(NATS * logprob) if math.isfinite(logprob) else None


def _without_middle(text: str) -> str:
    half = MAX_PROMPT_CHARACTERS // 2
    left_out = len(text) - 2 * half
    return text if left_out <= 0 else f"{text[:half]} … ({left_out:,} characters) … {text[-half:]}"
