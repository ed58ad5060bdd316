"""Open groups in a checkpoint: what is read back is what was saved, and what cannot be is told."""

import numpy as np
import pytest
from attrs import fields_dict

from rlcore.spi import CheckpointError
from rlcore_rollout.curriculum import CurriculumState
from rlcore_rollout.episode_group import EpisodeGroup
from rlcore_rollout.saved_rollouts import SavedRollouts, dumps, loads
from rlcore_rollout.schedule import Position
from rlcore_rollout.serialization import dumps as dump_object


def test_what_is_loaded_is_what_was_saved() -> None:
    position = Position(next_number=9, trained=2, running={7: 1}, complete={6: 2})
    saved = SavedRollouts(position=position, groups={7: b"serialized"}, spared={3: 1}, version_of_step={1: 4, 2: 8})
    assert loads(dumps(saved)) == saved


@pytest.mark.parametrize("data", [b"", b"not serialized", dumps(SavedRollouts(position=Position()))[:-5]])
def test_damaged_ones_are_refused(data: bytes) -> None:
    with pytest.raises(CheckpointError, match="cannot be read"):
        loads(data)


def test_another_object_is_refused() -> None:
    with pytest.raises(CheckpointError, match="ndarray"):
        loads(dump_object(np.zeros(3)))


def test_those_of_before_an_attribute_are_refused() -> None:
    curriculum = CurriculumState(position=0, no_variance=np.zeros(2, np.bool_), planned={})
    data = dumps(SavedRollouts(position=Position(), curriculum=curriculum)).replace(b'"levels"', b'"ladder"')
    with pytest.raises(CheckpointError, match="no levels.* version"):
        loads(data)


def test_groups_keep_nothing_that_follows_from_the_recipe() -> None:
    """One attribute more refuses all checkpoints of before; a rule of the run is the work's, which a resumed run has too."""
    kept = "number replacement spare num_long reset prompt images is_left_out episodes max_turn_tokens _first_open"
    assert {*fields_dict(EpisodeGroup)} == {*kept.split()}
