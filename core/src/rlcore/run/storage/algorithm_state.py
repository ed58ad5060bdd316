"""Saves and reads the state of an algorithm in a checkpoint.

algorithm/state.json   whose it is, its numbers, and the names of its arrays
          arrays.npz   the arrays, in that order
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from attrs import frozen

from rlcore.reading import read_json
from rlcore.registry.algorithm_handle import AlgorithmHandle, AlgorithmState
from rlcore.spi import CheckpointError

FOLDER, DESCRIPTION, ARRAYS = "algorithm", "state.json", "arrays.npz"


@frozen(kw_only=True)
class SavedState:
    """An algorithm's state as it was read from a checkpoint."""

    algorithm: str
    """The plugin's name."""
    state: AlgorithmState


def write_state(checkpoint: Path, algorithm: str, state: AlgorithmState) -> None:
    """Below the folder of a checkpoint that is being written."""
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
