"""What a distributed checkpoint says of itself: read without running anything, and compared with what is wanted."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint

from rlcore.spi import CheckpointError
from rlcore_megatron.checkpoints.checkpoint_check import check_shapes, read_metadata
from rlcore_torchkit.trainer.trainer_hooks import MAX_LISTED

WANTED = {"a": (3, 4), "b": (5,)}
STATES = {f"state.mean.{name}": shape for name, shape in WANTED.items()}
TENSORS = {name: torch.zeros(shape) for name, shape in {**WANTED, **STATES}.items()}


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """TENSORS as torch saves them, and the files that Megatron adds."""
    checkpoint.save(TENSORS, checkpoint_id=tmp_path / "state", no_dist=True)
    (tmp_path / "state" / "metadata.json").write_text("{}")
    return tmp_path / "state"


class Harmful:
    """Says in its pickle that reading it is to make a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self._path,)


def test_a_whole_checkpoint_is_described(state: Path) -> None:
    found = read_metadata(state).state_dict_metadata
    assert {name: tuple(entry.size) for name, entry in found.items()} == {
        name: tuple(tensor.shape) for name, tensor in TENSORS.items()
    }


def test_pickle_that_names_anything_else_is_refused_before_it_runs(state: Path, tmp_path: Path) -> None:
    (state / ".metadata").write_bytes(pickle.dumps(Harmful(tmp_path / "made")))
    with pytest.raises(CheckpointError, match="no checkpoint needs"):
        read_metadata(state)
    assert not (tmp_path / "made").exists()
    (state / ".metadata").write_bytes(pickle.dumps([1, 2]))
    with pytest.raises(CheckpointError, match="a list; .* Metadata"):
        read_metadata(state)


def test_files_that_are_missing_or_short_are_named(state: Path) -> None:
    tensors, described = next(state.glob("*.distcp")), (state / ".metadata").read_bytes()
    content = tensors.read_bytes()
    (state / "metadata.json").unlink()
    with pytest.raises(CheckpointError, match="metadata.json: found no such file"):
        read_metadata(state)
    (state / "metadata.json").write_text("{}")
    tensors.write_bytes(content[:-1])
    with pytest.raises(CheckpointError, match=f"{tensors.name}: .* {len(content) - 1} bytes; .* {len(content)}"):
        read_metadata(state)
    tensors.write_bytes(content)
    for damaged in (b"", described[:-20], b"no pickle"):
        (state / ".metadata").write_bytes(damaged)
        with pytest.raises(CheckpointError, match=".metadata cannot be read"):
            read_metadata(state)
    (state / ".metadata").unlink()
    with pytest.raises(CheckpointError, match=".metadata cannot be read"):
        read_metadata(state)


def test_the_same_names_and_shapes_are_right(state: Path) -> None:
    check_shapes(state, read_metadata(state), WANTED, STATES, "state.")


@pytest.mark.parametrize(
    ("wanted", "text"),
    [
        (WANTED | {"a": (4, 3)}, r"a: \[3, 4\] there, \[4, 3\] here"),
        (WANTED | {"c": (1,)}, r"c: absent there, \[1\] here"),
        ({"a": (3, 4)}, r"b: \[5\] there, absent here"),
    ],
)
def test_another_models_are_told_apart(wanted: dict[str, Any], text: str, state: Path) -> None:
    with pytest.raises(CheckpointError, match=f"Shapes differ: {text}"):
        check_shapes(state, read_metadata(state), wanted, STATES, "state.")


def test_of_many_differences_the_first_are_named(state: Path) -> None:
    wanted = WANTED | {f"c{number}": (1,) for number in range(MAX_LISTED + 2)}
    with pytest.raises(CheckpointError) as raised:
        check_shapes(state, read_metadata(state), wanted, STATES, "state.")
    assert str(raised.value).count("absent there") == MAX_LISTED
    assert "2 more" in str(raised.value)


def test_state_of_another_optimizer_is_named(state: Path) -> None:
    with pytest.raises(CheckpointError, match=r"mean .* state\.square\.a; .* optimizer\.name"):
        check_shapes(state, read_metadata(state), WANTED, STATES | {"state.square.a": (3, 4)}, "state.")


def test_state_of_another_shape_is_named(state: Path) -> None:
    with pytest.raises(CheckpointError, match=r"found \[3, 4\] for state\.mean\.a; expected \[12\]"):
        check_shapes(state, read_metadata(state), WANTED, STATES | {"state.mean.a": (12,)}, "state.")


def test_state_may_be_missing_before_the_first_step(state: Path) -> None:
    check_shapes(state, read_metadata(state), WANTED, {}, "state.")
