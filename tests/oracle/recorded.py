"""What a run left behind, as plain numbers: its samples, its figures, its weights, and what its trainer was asked to do.

Nothing here is rlcore's: Parquet, JSON, safetensors, and numpy arrays in pickles.
"""

import itertools
import json
import pickle
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as parquet
import torch
from attrs import frozen
from numpy.typing import NDArray
from safetensors.torch import load_file


@frozen(kw_only=True, eq=False)
class Sample:
    """One row of a step's rollouts; arrays are [L], prompt and response together."""

    group: int
    prompt: str
    response: str
    tokens: NDArray[np.int64]
    loss_mask: NDArray[np.bool_]
    generation_logprobs: NDArray[np.float32]
    weight_versions: NDArray[np.int64]
    reward: float
    valid: bool
    """Whether it is trained on."""
    is_cut: bool
    """Whether a limit of tokens ended it."""
    kept: list[list[int]] | None
    """Ids of the tokens that each was chosen among, where the run records them; none where that is all."""

    @property
    def key(self) -> tuple[int, bytes, bytes]:
        """What tells it from the other samples of its step."""
        return self.group, self.tokens.tobytes(), self.generation_logprobs.tobytes()


@frozen(kw_only=True, eq=False)
class Sequence:
    """A sequence as a rank's backend saw it; arrays are [L]."""

    group: int
    tokens: NDArray[np.int64]
    loss_mask: NDArray[np.bool_]
    columns: Mapping[str, NDArray[np.float32]]

    @property
    def key(self) -> tuple[int, bytes, bytes]:
        """That of the sample it came from."""
        return self.group, self.tokens.tobytes(), self.columns["generation_logprobs"].tobytes()


@frozen(kw_only=True, eq=False)
class Part:
    """One rank's share of an update."""

    microbatches: list[list[Sequence]]
    num_loss_tokens: int
    num_loss_sequences: int
    temperature: float
    figures: Mapping[str, float]


@frozen(kw_only=True, eq=False)
class RecordedRun:
    """All of it."""

    samples: list[list[Sample]]
    """Of each step."""
    metrics: list[Mapping[str, float]]
    """The line of each step in metrics.jsonl."""
    updates: list[list[Part]]
    """In the order they were made, each with the share of every rank."""
    weights: Mapping[str, torch.Tensor]
    """After the last step, by their names in Hugging Face's files."""

    @classmethod
    def read(cls, run_directory: Path, train_steps: Path) -> "RecordedRun":
        lines = [json.loads(line) for line in (run_directory / "metrics.jsonl").read_text().splitlines()]
        return cls(
            samples=read_samples(run_directory),
            metrics=[line for line in lines if line["step"] > 0],
            updates=_updates(train_steps),
            weights=load_file(run_directory / "model" / "model.safetensors"),
        )


def read_samples(run_directory: Path) -> list[list[Sample]]:
    """Of each step."""
    rollouts = sorted((run_directory / "rollouts").glob("step-*.parquet"))
    return [[_sample(row) for row in parquet.read_table(path).to_pylist()] for path in rollouts]


def _sample(row: Mapping[str, Any]) -> Sample:
    return Sample(
        group=row["group"],
        prompt=row["prompt"],
        response=row["response"],
        tokens=np.asarray(row["tokens"], np.int64),
        loss_mask=np.asarray(row["loss_mask"], np.bool_),
        generation_logprobs=np.asarray(row["generation_logprobs"], np.float32),
        weight_versions=np.asarray(row["weight_versions"], np.int64),
        reward=row["reward"],
        valid=row["valid"],
        is_cut=row["finish_reason"] == "length",
        kept=row.get("sampling_mask"),
    )


def _updates(folder: Path) -> list[list[Part]]:
    found: dict[int, list[Part]] = defaultdict(list)
    for path in sorted(folder.iterdir()):
        step = pickle.loads(path.read_bytes())
        part = Part(
            microbatches=[list(_sequences(batch)) for batch in step["microbatches"]],
            **{name: step[name] for name in ("num_loss_tokens", "num_loss_sequences", "temperature", "figures")},
        )
        found[step["weight_version"]].append(part)
    assert list(found) == list(range(len(found))), f"updates started from the weight versions {list(found)}"
    return list(found.values())


def _sequences(batch: Mapping[str, Any]) -> Iterator[Sequence]:
    offsets = batch["offsets"].tolist()
    for number, (start, end) in enumerate(itertools.pairwise(offsets)):
        yield Sequence(
            group=int(batch["sequence_columns"]["group_ids"][number]),
            tokens=batch["tokens"][start:end].astype(np.int64),
            loss_mask=batch["loss_mask"][start:end],
            columns={name: column[start:end] for name, column in batch["token_columns"].items()},
        )
