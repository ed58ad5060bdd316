"""Dumps of samples that other frameworks write, as the samples of a comparison.

TRL writes `completions_STEP.parquet` with `log_completions`: step, prompt, completion, a column a reward function, and
advantage. verl writes `STEP.jsonl` with `trainer.rollout_data_dir` or `validation_data_dir`: input, output, gts, score, step.
Neither holds token ids or log-probabilities.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch
from attrs import frozen
from numpy.typing import NDArray

from rlcore.reading import parse_json, read_bytes, read_parquet
from rlcore.spi import CheckpointError
from rlcore_bundles.compared_batch import ComparedBatch, Rows, changed_options
from rlcore_bundles.own_side import OwnSide
from rlcore_bundles.peers.contract import Samples, Setup
from rlcore_torchkit.rl.loss_config import LossConfig

NOT_IN_DUMPS = "token ids, loss masks, and the log-probabilities of policy, generator and reference"
TRL_COLUMNS, VERL_COLUMNS = ("prompt", "completion", "advantage"), ("input", "output", "score")
NOT_REWARDS = ("step", "advantage")
OF_GRPO: Mapping[str, Any] = {
    "advantage_baseline": "group_mean",
    "advantage_normalisation": "std",
    "advantage_epsilon": 1e-6,
    "length_penalty": "none",
    "previous_logprobs": "trainer",
}
"""rlcore's options for a dump, which comes without a recipe."""


@frozen(kw_only=True, eq=False)
class Dump:
    """N samples of a dump, in their order."""

    path: Path
    rewards: NDArray[np.float64]
    """float64 [N]"""
    prompts: Sequence[str]
    advantages: NDArray[np.float64] | None
    """float64 [N] that the framework wrote; None where it writes none."""
    missing: Sequence[str]
    """The parts of a comparison that the dump does not hold."""
    notes: Sequence[str] = ()


def read_dump(path: Path) -> Dump:
    """Read a dump by its columns. CheckpointError where the file is none of a known framework."""
    if path.is_dir():
        files = sorted(one.name for one in path.iterdir())[:8]
        raise CheckpointError(
            f"--from: found {path}, a folder with {', '.join(files) or 'nothing'}; expected one file of it, of one step"
        )
    if path.suffix == ".parquet":
        return _of_trl(path)
    if path.suffix == ".jsonl":
        return _of_verl(path)
    raise CheckpointError(f"--from: found {path.name}; expected TRL's completions_STEP.parquet or verl's STEP.jsonl")


def dump_batch(dump: Dump, changes: Mapping[str, Any]) -> ComparedBatch:
    """The samples of a dump as one that both sides compute from, with GRPO's options but for `changes`."""
    config = attrs.asdict(LossConfig()) | dict(OF_GRPO)
    options = {**config, **changed_options(config, changes)}
    groups = np.cumsum([before != after for before, after in zip(["", *dump.prompts], dump.prompts, strict=False)])
    mask = np.ones((len(dump.rewards), 1), np.bool_)
    samples = Samples(
        rewards=torch.from_numpy(dump.rewards),
        group_ids=torch.from_numpy(groups.astype(np.int64)),
        truncated=torch.zeros(len(groups), dtype=torch.bool),
        mask=torch.from_numpy(mask),
    )
    sizes = np.unique(groups, return_counts=True)[1]
    setup = Setup(options=options, samples_per_prompt=int(sizes.max(initial=1)), max_response_tokens=1, masks_truncated=False)
    numbers = np.arange(len(groups))
    return ComparedBatch(
        own=OwnSide(samples=samples, options=options),
        setup=setup,
        sample_rows=Rows(numbers=numbers, starts=np.zeros(len(groups), np.int64), mask=mask),
        reasons={"loss": f"the dump does not hold {NOT_IN_DUMPS}"},
        notes=[f"{len(groups)} samples of {len(sizes)} prompts. Not in the dump: {'; '.join(dump.missing)}.", *dump.notes],
    )


def _of_trl(path: Path) -> Dump:
    table = read_parquet(path)
    _require(path, table.column_names, TRL_COLUMNS, "TRL's table of completions")
    columns = {name: table.column(name).to_pylist() for name in table.column_names}
    if not table.num_rows:
        raise CheckpointError(f"{path}: found no sample; expected TRL's table of completions")
    wrong = [number for number, one in enumerate(columns["advantage"]) if one is None or not _is_number(one)]
    if wrong:
        raise CheckpointError(f"{path}: found no number as advantage in row {wrong[0]}, counted from 0; expected one in each")
    texts = (*NOT_REWARDS, "prompt", "completion")
    rewards = {name: column for name, column in columns.items() if name not in texts and all(map(_is_number, column))}
    if not rewards:
        raise CheckpointError(f"{path}: found no column of rewards in {', '.join(columns)}; expected one a reward function")
    notes = [] if len(rewards) == 1 else [f"The reward is the sum of {', '.join(rewards)}, each with weight 1."]
    totals = [sum(value or 0.0 for value in row) for row in zip(*rewards.values(), strict=True)]
    return Dump(
        path=path,
        rewards=np.array(totals, np.float64),
        prompts=[json.dumps(one, sort_keys=True, default=str) for one in columns["prompt"]],
        advantages=np.array(columns["advantage"], np.float64),
        missing=[NOT_IN_DUMPS, "the weights of reward functions"],
        notes=notes,
    )


def _of_verl(path: Path) -> Dump:
    rows = list(_rows(path))
    for number, row in enumerate(rows, 1):
        _require(f"{path}, line {number}", list(row), VERL_COLUMNS, "verl's dump of generations")
    if not rows:
        raise CheckpointError(f"{path}: found no sample; expected verl's dump of generations")
    wrong = [number for number, row in enumerate(rows, 1) if not _is_number(row.get("score")) or row.get("score") is None]
    if wrong:
        raise CheckpointError(f"{path}: found no number as score in line {wrong[0]}; expected one in each")
    # verl sorts nothing: samples of a prompt are adjacent, as it repeats each prompt in place.
    return Dump(
        path=path,
        rewards=np.array([row["score"] for row in rows], np.float64),
        prompts=[str(row["input"]) for row in rows],
        advantages=None,
        missing=[NOT_IN_DUMPS, "advantages"],
    )


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(read_bytes(path).splitlines(), 1):
        try:
            row = parse_json(line)
        except ValueError as error:
            raise CheckpointError(f"{path}, line {number}: found no JSON: {error}; expected a sample") from error
        if not isinstance(row, dict):
            raise CheckpointError(f"{path}, line {number}: found a {type(row).__name__}; expected a sample")
        yield row


def _require(path: object, found: Sequence[str], names: Sequence[str], what: str) -> None:
    if missing := [name for name in names if name not in found]:
        raise CheckpointError(f"{path}: found the columns {', '.join(found)}; expected {', '.join(missing)} too, as in {what}")


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))
