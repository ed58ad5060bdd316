"""Records one step of a run: the run goes on from the checkpoint before it, in a folder of its own, up to the step."""

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from attrs import evolve, frozen

from rlcore.files import storage_errors
from rlcore.run.plan.prepare import prepare, require_device
from rlcore.run.report.progress import Progress
from rlcore.run.storage.run_directory import RunDirectory, step_of
from rlcore.run.storage.saved_run import SavedRun
from rlcore.run.train import train
from rlcore.spi import WEIGHT_VERSIONS, CheckpointError, ConfigError, Problem
from rlcore_bundles.bundle import Bundle, Prompts, Weights
from rlcore_bundles.observer import STOP_BEHIND, StepRecorded
from rlcore_bundles.run_difference import MEASURED, differing_figures
from rlcore_bundles.storage import MODEL, STATE, read_bundle, write_bundle

NAME = "run"


@frozen(kw_only=True)
class Recorded:
    """A step that was recorded."""

    bundle: Bundle
    num_bytes: int
    differing: Mapping[str, tuple[float, float]]
    """The figures of the run's own metrics.jsonl that the step has not repeated, with both values."""
    num_equal: int
    """The figures that it has repeated to the bit."""


class _Notes(Progress):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def note(self, text: str) -> None:
        """See Progress."""
        self.texts.append(text)


def record(
    run: Path,
    step: int,
    output: Path,
    overrides: Sequence[str] = (),
    *,
    weights: Weights = "model",
    prompts: Prompts = "kept",
    tell: Callable[[str], None] = lambda _: None,
) -> Recorded:
    """Write a step of a run to a bundle. The run directory stays as it is. Raises RlcoreError where the step cannot be computed
    from a checkpoint of the run."""
    saved = SavedRun.find(run)
    problems = []
    most = _num_steps(saved)
    if not 1 <= step <= most:
        problems.append(Problem(path="--step", found=str(step), expected=f"a step of the run, from 1 to {most}"))
    if output.exists():
        problems.append(Problem(path="--output", found=f"{output}, which exists", expected="a new folder"))
    if problems:
        raise ConfigError(problems)
    checkpoint = _before(saved, step)
    behind = 0 if checkpoint is None else step_of(checkpoint) or 0
    tell(f"step {step} of {run}, computed from {'the beginning' if checkpoint is None else checkpoint}")
    with storage_errors("the bundle", output.parent, otherwise="name another folder"):
        output.parent.mkdir(parents=True, exist_ok=True)
        opened = tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}-")
    with opened as folder:
        notes = _continue(saved, checkpoint, behind, Path(folder), step, [*_options(step, weights), *overrides])
        made = Path(folder) / NAME / "bundles" / f"step-{step:06d}"
        if not made.is_dir():
            raise CheckpointError("\n".join([f"step {step} was not written:", *notes]))
        bundle = without_prompts(read_bundle(made), prompts)
        moves = {folder: made / folder for folder in (MODEL, STATE) if (made / folder).is_dir()}

        def move(partial: Path) -> None:
            for name, source in moves.items():
                source.rename(partial / name)

        size = write_bundle(bundle, output, move if moves else None)
    found = next((line for line in RunDirectory(path=run).read_metrics() if line["step"] == step), {})
    differing = {one.name: (one.first, one.second) for one in differing_figures(found, bundle.metrics)}
    num_equal = sum(not name.startswith(MEASURED) for name in found.keys() & bundle.metrics.keys()) - len(differing)
    return Recorded(bundle=evolve(bundle, directory=output), num_bytes=size, differing=differing, num_equal=num_equal)


def without_prompts(bundle: Bundle, prompts: Prompts) -> Bundle:
    """The bundle without its prompts: their tokens are 0, and of rows there is a hash or nothing."""
    if prompts == "kept":
        return bundle
    sampled, trained = bundle.sampled, bundle.trained
    hashes = [hashlib.sha256(json.dumps(row, sort_keys=True, default=str).encode()).hexdigest() for row in sampled.rows]

    def blank(batch: Any) -> Any:
        generated = batch.token_columns[WEIGHT_VERSIONS] >= 0
        return evolve(batch, tokens=np.where(generated, batch.tokens, 0).astype(np.int32), images=None)

    return evolve(
        bundle,
        prompts=prompts,
        row_hashes=hashes if prompts == "hashed" else (),
        sampled=evolve(sampled, batch=blank(sampled.batch), rows=(), reset_seeds=()),
        trained=blank(trained),
    )


def _num_steps(saved: SavedRun) -> int:
    """The steps of a run's recipe. CheckpointError where it has none."""
    run = saved.recipe.get("run")
    found = run.get("num_steps") if isinstance(run, dict) else None
    if not isinstance(found, int):
        path = saved.path / "recipe.toml"
        raise CheckpointError(f"{path} is damaged: found run.num_steps = {found!r}; expected a number. Restore the file.")
    return found


def _before(saved: SavedRun, step: int) -> Path | None:
    """The newest checkpoint before a step; None for the run's beginning."""
    found = {number: path for path in saved.checkpoints if (number := step_of(path)) is not None and number < step}
    return found[max(found)] if found else None


def _options(step: int, weights: Weights) -> list[str]:
    return [
        f"logging.bundles_every_n_steps={step}",
        f"logging.bundle_weights={weights}",
        "logging.bundles_on_alarm=false",
        "logging.rollouts_every_n_steps=0",
        "checkpoint.every_n_steps=0",
        "checkpoint.at_end=false",
        "sinks.names=[]",
    ]


def _continue(
    saved: SavedRun,
    checkpoint: Path | None,
    behind: int,
    folder: Path,
    step: int,
    overrides: Sequence[str],
) -> list[str]:
    """Run from a checkpoint, or the beginning, up to the step. Return the notes of the run."""
    directory = folder / NAME
    place = [f"run.directory={folder}", f"run.name={NAME}"]
    off = ["receipts.every_n_steps=0"] if "receipts" in saved.recipe else []
    plan = prepare(saved.path / "recipe.toml", [*overrides, *off, *place], continues=checkpoint is not None)
    require_device(plan)
    if checkpoint is not None:
        directory.mkdir()
        shutil.copytree(checkpoint, directory / "checkpoints" / checkpoint.name)
        shutil.copy(saved.path / "recipe.toml", directory)
        lines = [line for line in RunDirectory(path=saved.path).read_metrics() if line["step"] <= behind]
        (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    token, notes = STOP_BEHIND.set(step), _Notes()
    try:
        train(plan, resume=checkpoint is not None, progress=notes)
    except StepRecorded:
        pass
    finally:
        STOP_BEHIND.reset(token)
    return notes.texts
