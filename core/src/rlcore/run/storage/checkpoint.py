"""Checkpoints: written to a temporary name, described by a manifest with sizes and digests, then renamed.

step-000010/manifest.json     every other file with its size and SHA-256
            loop.json         where the loop stands
            rollouts.state    samples under way, and the position in the data, where they do not follow from the step
            trainer/…         what the backends wrote
            critic/…          where one is trained
            generator/…
            algorithm/state.json   whose it is, its numbers, and the names of its arrays
                      arrays.npz   the arrays, in that order
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from attrs import asdict, field, frozen

from rlcore.files import storage_errors
from rlcore.reading import numbers, parse_json, read_json, read_record
from rlcore.registry.algorithm_handle import AlgorithmHandle, AlgorithmState
from rlcore.run.storage.run_directory import step_of
from rlcore.schema.constraints import Count
from rlcore.schema.file_limits import read_file
from rlcore.schema.suggestions import similar_path
from rlcore.spi import CheckpointError

FORMAT = 1
MANIFEST = "manifest.json"
LOOP_STATE = "loop.json"


@frozen(kw_only=True)
class LoopState:
    """The state of the loop between two steps; everything else follows from the recipe's seed."""

    step: Count
    """The number of steps that are done."""
    weight_version: Count
    """The number of optimizer steps that are done."""
    model: str
    """Digest of the model that the run began with, or its Hub name: a checkpoint of another one is refused."""
    trainer: str
    """The plugin that wrote it, which alone can read it."""
    reference: str | None = None
    """Digest of the model in [reference], or its Hub name; None where the recipe has no such section."""
    critic: str | None = None
    """Digest of the model that the critic began with, or its Hub name; None where none is trained."""
    data: str | None = None
    """RowDigests.read of the rows to train on."""
    own_rows: str | None = None
    """RowDigests.own of them."""
    critic_version: int = 0
    """The number of the critic's optimizer steps that are done."""
    unlogged: Mapping[str, Any] | None = field(default=None, validator=numbers)
    """Metrics of `step` where it was saved before its evaluation and its line in metrics.jsonl; None after them."""


def begin_checkpoint(root: Path, state: LoopState, write: Callable[[Path], None], *, keep: int | None) -> Callable[[], Path]:
    """Write what `write` puts into the directory it is given. The function that is returned, which another thread may call,
    makes root/step-N of it, drops all but the `keep` newest, if any, and returns the path.

    Both raise StorageError when the disk is full, and then leave the earlier checkpoints as they were.
    """
    final = root / f"step-{state.step:06d}"
    partial = root / f".{final.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)

    @contextmanager
    def whole() -> Iterator[None]:
        try:
            with storage_errors(f"checkpoint {final.name}", root):
                yield
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise

    def complete() -> Path:
        with whole():
            manifest = {"format": FORMAT, "files": _describe(partial)}
            (partial / MANIFEST).write_text(json.dumps(manifest, indent=2))
            for path in [*partial.rglob("*"), partial]:
                sync(path)
            if final.exists():
                shutil.rmtree(final)
            partial.rename(final)
            sync(root)
        for old in list_checkpoints(root)[:-keep] if keep is not None else []:
            shutil.rmtree(old, ignore_errors=True)
        return final

    with whole():
        partial.mkdir(parents=True)
        (partial / LOOP_STATE).write_text(json.dumps(asdict(state), indent=2))
        write(partial)
    return complete


def list_checkpoints(root: Path) -> list[Path]:
    """Complete checkpoints, oldest first; half-written ones, and what is named otherwise, are not among them."""
    return [path for path in _step_folders(root) if (path / MANIFEST).is_file()]


def _step_folders(root: Path) -> list[Path]:
    found = {number: path for path in root.glob("step-*") if (number := step_of(path)) is not None}
    return [found[number] for number in sorted(found)]


def newest_checkpoint(root: Path, note: Callable[[str], None]) -> Path | None:
    """The newest intact checkpoint, or None where there is none; each damaged one that is passed over is noted, one without a
    manifest too, since what is half written has another name.

    Raises CheckpointError where there are checkpoints and none is intact.
    """
    damages = []
    for path in reversed(_step_folders(root)):
        damage = find_damage(path)
        if damage is None:
            return path
        damages.append(f"{path}: {damage}")
        note(f"checkpoint {path.name} is damaged and passed over: {damage}")
    if damages:
        raise CheckpointError("no intact checkpoint:\n" + "\n".join(f"  - {damage}" for damage in damages))
    return None


def find_damage(checkpoint: Path) -> str | None:
    """Return the damage of a checkpoint's files; None where each has its size and digest."""
    try:
        expected = _read_manifest(checkpoint)
        for name, entry in expected.items():
            path = checkpoint / name
            if not path.is_file():
                return f"{name} is missing"
            if path.stat().st_size != entry["bytes"]:
                return f"{name} has {path.stat().st_size} bytes; expected {entry['bytes']}"
        found = _describe(checkpoint)
    except _DamageError as damage:
        return str(damage)
    except OSError as error:
        return f"{error.filename} cannot be read ({error.strerror or error})"
    for name, entry in expected.items():
        if name not in found or found[name]["sha256"] != entry["sha256"]:
            return f"{name} has another content than was saved (SHA-256 differs)"
    return None


def require_intact(checkpoint: Path) -> Path:
    """The checkpoint; CheckpointError where it is damaged or none at all."""
    damage = find_damage(checkpoint) if checkpoint.is_dir() else "there is no such folder"
    if damage is not None:
        remedy = "" if checkpoint.is_dir() else similar_path(checkpoint)
        remedy = remedy or "Name an intact checkpoint of the run, a folder checkpoints/step-N"
        raise CheckpointError(f"{checkpoint} is no intact checkpoint: {damage}. {remedy}")
    return checkpoint


class _DamageError(Exception):
    """A manifest is damaged; its text says how."""


def _read_manifest(checkpoint: Path) -> Mapping[str, Mapping[str, Any]]:
    """Size and digest by file; _DamageError where the file is no manifest of this version, OSError where it cannot be read."""
    try:
        manifest = parse_json(read_file(checkpoint / MANIFEST))
    except ValueError as error:  # no JSON, no UTF-8, or too deep
        raise _DamageError(f"{MANIFEST} is no JSON ({error})") from error
    if not isinstance(manifest, dict):
        raise _DamageError(f"{MANIFEST} holds a {type(manifest).__name__}; expected an object")
    if manifest.get("format") != FORMAT:
        raise _DamageError(f"found format {manifest.get('format')!r}; this version of rlcore reads {FORMAT}")
    files = manifest.get("files")
    if not isinstance(files, dict) or not all(
        isinstance(one, dict) and {"bytes", "sha256"} <= one.keys() for one in files.values()
    ):
        raise _DamageError(f"{MANIFEST} does not list files with their bytes and sha256")
    if LOOP_STATE not in files:
        raise _DamageError(f"{MANIFEST} does not list {LOOP_STATE}")
    return files


def read_loop_state(checkpoint: Path) -> LoopState:
    """Raises CheckpointError where loop.json is not one of this version's."""
    return read_record(checkpoint / LOOP_STATE, LoopState)


def _describe(directory: Path) -> dict[str, dict[str, object]]:
    """Size and digest of each file but the manifest. Hashing runs beside the interpreter lock, so threads help."""
    paths = sorted(path for path in directory.rglob("*") if path.is_file() and path.name != MANIFEST)
    stats = [path.stat() for path in paths]
    with ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:  # others need cores, too
        digests = pool.map(_sha256, paths, [(stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for stat in stats])
    return {
        str(path.relative_to(directory)): {"bytes": stat.st_size, "sha256": digest}
        for path, stat, digest in zip(paths, stats, digests, strict=True)
    }


@lru_cache(maxsize=4096)
def _sha256(path: Path, _state: tuple[int, ...]) -> str:
    """The digest of a file; computed once while the file stays as it is, since a resumed run checks its checkpoint twice. The
    state has its time of change, which no copy sets back as it does the time of modification."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Wait until a file or folder is on its disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


FOLDER, DESCRIPTION, ARRAYS = "algorithm", "state.json", "arrays.npz"


@frozen(kw_only=True)
class SavedState:
    """An algorithm's state as it was read from a checkpoint."""

    algorithm: str
    """The plugin's name."""
    state: AlgorithmState


def write_state(checkpoint: Path, algorithm: str, state: AlgorithmState) -> None:
    """Write an algorithm's state into the folder of a checkpoint."""
    arrays = {name: value for name, value in state.items() if isinstance(value, np.ndarray)}
    numbers = {name: value for name, value in state.items() if name not in arrays}
    folder = checkpoint / FOLDER
    folder.mkdir()
    np.savez(folder / ARRAYS, *arrays.values())
    (folder / DESCRIPTION).write_text(
        json.dumps({"algorithm": algorithm, "numbers": numbers, "arrays": list(arrays)}, indent=2)
    )


def read_state(checkpoint: Path) -> SavedState | None:
    """Read the state that `write_state` wrote; None where the algorithm kept nothing. CheckpointError where it cannot be
    read."""
    folder = checkpoint / FOLDER
    if not folder.is_dir():
        return None
    try:
        described: Any = read_json(folder / DESCRIPTION)
        with np.load(folder / ARRAYS, allow_pickle=False) as file:
            arrays = {name: file[f"arr_{index}"] for index, name in enumerate(described["arrays"])}
        return SavedState(algorithm=described["algorithm"], state={**described["numbers"], **arrays})
    except CheckpointError:
        raise
    except Exception as error:  # whatever a damaged archive leads to
        raise CheckpointError(f"{folder} cannot be read: {type(error).__name__}: {error}") from error


def state_for(algorithm: AlgorithmHandle, checkpoint: Path, *, allow_changes: bool) -> tuple[AlgorithmState | None, str]:
    """Return the state with which the algorithm continues, None where this checkpoint has none, and then a note about it.

    CheckpointError where the algorithm keeps a state that the checkpoint does not have, or the other way round, unless
    `allow_changes`: the algorithm then begins anew.
    """
    saved, name = read_state(checkpoint), algorithm.entry.name
    if saved is None and not algorithm.is_stateful:
        return None, ""
    if saved is not None and algorithm.is_stateful and saved.algorithm == name:
        return saved.state, ""
    found = "no state of an algorithm" if saved is None else f"the state of algorithm {saved.algorithm!r}"
    expected = "the one that it keeps between steps" if algorithm.is_stateful else "none, since it keeps nothing between steps"
    text = f"{checkpoint} holds {found}; algorithm {name!r} ({algorithm.entry.version}) expects {expected}"
    if not allow_changes:
        raise CheckpointError(
            f"{text}. Resume with the version of the algorithm that saved it, choose another run.name, or add --allow-changes "
            "to go on without that state"
        )
    return None, f"{text}; it begins anew"
