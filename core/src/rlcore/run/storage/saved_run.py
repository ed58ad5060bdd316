"""Reads the directory of a run: figures as columns, samples as tables, checkpoints."""

from collections.abc import Callable, Iterator, Mapping
from os.path import lexists
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from attrs import frozen

from rlcore.reading import read_json, read_parquet, read_toml
from rlcore.run.storage.checkpoint import list_checkpoints
from rlcore.run.storage.run_directory import RunDirectory, step_of
from rlcore.schema.file_limits import expanded
from rlcore.spi import ADVANTAGES, CheckpointError

Float64Array: TypeAlias = np.ndarray[tuple[int], np.dtype[np.float64]]
_COLUMNS: Mapping[str, Callable[[pa.DataType], bool]] = {
    **dict.fromkeys(("step", "group", "num_generated"), pa.types.is_integer),
    **dict.fromkeys(
        ("prompt", "response", "finish_reason"), lambda kind: pa.types.is_string(kind) or pa.types.is_large_string(kind)
    ),
    **dict.fromkeys(("success", "valid"), pa.types.is_boolean),
    "reward": pa.types.is_floating,
}
_TOKEN_COLUMNS: Mapping[str, Callable[[pa.DataType], bool]] = {
    "tokens": pa.types.is_integer,
    "loss_mask": pa.types.is_boolean,
    "generation_logprobs": pa.types.is_floating,
    ADVANTAGES: pa.types.is_floating,
}
"""Columns that every table of samples has, with the type of their values; one of answers lacks the advantages."""
Kind: TypeAlias = Literal["step", "evaluation"]


@frozen
class SavedRun:
    """A run, finished or not. Everything is read when it is asked for, so that a run which goes on may be looked at."""

    path: Path
    """The run directory."""

    @classmethod
    def find(cls, path: str | Path) -> "SavedRun":
        """The run of a directory. CheckpointError where there is none."""
        directory = expanded(path)
        if not (directory / "recipe.toml").is_file():
            raise CheckpointError(
                f"found no run in {directory}; expected run.directory/run.name of one, which holds recipe.toml"
            )
        return cls(directory)

    @property
    def recipe(self) -> dict[str, Any]:
        """The recipe as it ran, with every default."""
        return read_toml(self.path / "recipe.toml")

    @property
    def summary(self) -> dict[str, Any]:
        """The run's final figures; empty where it has not come to its last step."""
        file = RunDirectory(path=self.path).summary_file
        return read_json(file) if lexists(file) else {}

    @property
    def metrics(self) -> dict[str, Float64Array]:
        """metrics.jsonl as columns, float64 [S]: `step`, and every figure, NaN in steps without it."""
        records = RunDirectory(path=self.path).read_metrics()
        names = dict.fromkeys(name for record in records for name in record)
        return {name: np.array([record.get(name, np.nan) for record in records], np.float64) for name in names}

    @property
    def checkpoints(self) -> list[Path]:
        """The checkpoints that are there, the oldest first."""
        return list_checkpoints(RunDirectory(path=self.path).checkpoints)

    @property
    def model(self) -> Path | None:
        """The exported model, as a Hugging Face directory; None where the run has exported none (checkpoint.export)."""
        model = self.path / "model"
        return model if model.is_dir() else None

    def saved_steps(self, kind: Kind = "step") -> list[int]:
        """The steps whose samples, or the answers of whose "evaluation", were kept, ascending."""
        files = RunDirectory(path=self.path).rollouts.glob(f"{kind}-*.parquet")
        return sorted(number for file in files if (number := step_of(file, kind)) is not None)

    def samples(self, step: int | None = None) -> pa.Table:
        """The samples of a step, by default of the last that were kept, one row each. CheckpointError where there are none."""
        return self._table("step", step, "samples", "logging.rollouts_every_n_steps says which are kept")

    def answers(self, step: int | None = None) -> pa.Table:
        """The answers of the evaluation behind a step, as `samples`."""
        return self._table("evaluation", step, "answers of an evaluation", "logging.evaluation_answers says whether they are")

    def _table(self, kind: Kind, step: int | None, what: str, remedy: str) -> pa.Table:
        steps = self.saved_steps(kind)
        if not steps or (step is not None and step not in steps):
            kept = f"those of the steps {', '.join(map(str, steps))}" if steps else "none"
            wanted = "any step" if step is None else f"step {step}"
            raise CheckpointError(f"{self.path} has no {what} of {wanted}; found {kept}. {remedy}")
        number = steps[-1] if step is None else step
        path = RunDirectory(path=self.path).rollouts / f"{kind}-{number:06d}.parquet"
        table = read_parquet(path)
        if problems := list(_column_problems(table)):
            expected = "the columns of samples, which docs/run-directory.md lists"
            raise CheckpointError(f"{path} is damaged, or of another version: found {', '.join(problems)}; expected {expected}")
        return table


def _column_problems(table: pa.Table) -> Iterator[str]:
    """Yield what `report` and `show` could not read of a table of samples."""
    lengths: dict[str, pa.ChunkedArray] = {}
    for name, is_kind in {**_COLUMNS, **_TOKEN_COLUMNS}.items():
        places = table.schema.get_all_field_indices(name)
        if name == ADVANTAGES and not places:
            continue
        if len(places) != 1:
            yield f"{len(places) or 'no'} columns {name!r}"
            continue
        column, of_tokens = table.column(places[0]), name in _TOKEN_COLUMNS
        kind = column.type
        is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
        if is_list != of_tokens or not is_kind(kind.value_type if is_list else kind):
            yield f"{name!r} of type {kind}"
        elif column.null_count or (of_tokens and pc.list_flatten(column).null_count):
            yield f"nulls in {name!r}"
        elif of_tokens:
            lengths[name] = pc.list_value_length(column)
    for name, length in lengths.items():
        if length != lengths.get("tokens", length):
            yield f"{name!r} of other lengths than 'tokens'"
