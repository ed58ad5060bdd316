"""The data of a step that is computed again: a folder `.step-N` in `receipts/` of the run directory, until the result is there.

The folder holds `model/`, a Hugging Face directory, `arrays.safetensors` and `job.json`.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
from attrs import field, frozen
from safetensors import SafetensorError
from safetensors.numpy import load, save

from rlcore.files import storage_errors, write_atomically
from rlcore.reading import read_bytes, read_json
from rlcore.spi import CheckpointError, ContractError, TokenBatch
from rlcore_bundles.arrays import Table, put_batch, take_batch

HEADER, ARRAYS, MODEL = "job.json", "arrays.safetensors", "model"
TRAINER_LOGPROBS = "trainer_logprobs"
"""float32 [T], a token column of the job's batch: the trainer's log-probability."""


@frozen(kw_only=True, eq=False)
class Job:
    """Sequences of a step, with the weights that the step begins with."""

    step: int
    weight_version: int
    batch: TokenBatch
    """The drawn sequences, with TRAINER_LOGPROBS and, of samples, the generator's log-probabilities and weight versions."""
    numbers: list[int]
    """[N]: the number of each sequence in the step's batch."""
    compares_generator: bool
    """False where the generator reports log-probabilities of another distribution, or there is none."""
    temperature: float
    max_tokens: int
    bound: float
    """Greatest mean difference in nats."""
    num_threads: int
    trust_remote_code: bool = False
    dtype: str = "float32"
    """The dtype of the weights that a refit brings."""
    digests: Mapping[str, int] = field(factory=dict)
    """The digest of each tensor that the refit to this version brought; empty where there was none."""


def folder_of(receipts: Path, step: int) -> Path:
    """The folder of a step's job."""
    return receipts / f".step-{step:06d}"


def write_job(job: Job, folder: Path) -> None:
    """Write a job beside its `model/`. StorageError where that fails."""
    table: Table = {}
    put_batch(table, "batch", job.batch)
    header = {name: value for name, value in _fields(job).items() if name != "batch"}
    with storage_errors("the receipt", folder):
        (folder / ARRAYS).write_bytes(save({name: array.copy() for name, array in table.items()}))
    write_atomically(folder / HEADER, json.dumps(header))  # the last: a folder with it is whole


def read_job(folder: Path) -> Job:
    """Read a job. CheckpointError where it is damaged."""
    try:
        return Job(batch=take_batch(load(read_bytes(folder / ARRAYS)), "batch"), **read_json(folder / HEADER))
    except (SafetensorError, ContractError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{folder} is damaged: found {error}; expected the data of a receipt. Remove it") from error


def _fields(job: Job) -> dict[str, Any]:
    return attrs.asdict(job, recurse=False) | {"digests": dict(job.digests)}
